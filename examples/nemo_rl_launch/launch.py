"""A NeMo RL recipe from start to end: find NeMo RL, read the recipe, train, say where the logs are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from nemo_rl_launch.checkout import use_checkout


def launch(path: Path, overrides: Sequence[str], console: Console) -> None:
    """Run the recipe `path`.

    Raises EnvironmentLacksError if NeMo RL or GPUs are missing, ConfigError for a faulty recipe, RefitError if the
    last refit failed.
    """
    root = use_checkout()
    # These import NeMo RL, or what only an environment of NeMo RL must have.
    from nemo_rl_launch.configuration import read_recipe
    from nemo_rl_launch.train import run

    config = read_recipe(path, overrides)
    console.print(f"NeMo RL of {root}, recipe {path}", soft_wrap=True, markup=False)
    folder = run(config)
    console.print(f"logs: {folder}; compare runs with `nemo-rl-reshard compare {folder} OTHER`", soft_wrap=True)
