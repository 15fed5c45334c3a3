"""The launcher as a user starts it, on the real NeMo RL: two runs of one recipe by different backends, then `compare`.

The recipe inherits `configs/nemo_rl/base.yaml` as ours do. What it changes is the model's size and the task.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpo_run
import grpo_task
import pytest
import yaml
from nemo_rl.distributed import virtual_cluster
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from omegaconf import OmegaConf
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import grpo_qwen
import nemo_rl_launch.train as launched

from nemo_rl_reshard.cli.compare import compare_runs
from nemo_rl_reshard.cli.run_records import LOOP_SECONDS

BASE = Path(__file__).parents[2] / "configs" / "nemo_rl" / "base.yaml"
STEPS = 2


def write_recipe(folder: Path) -> Path:
    """A YAML file that a user could have written."""
    recipe = grpo_run.recipe(folder, STEPS, num_trainers=2, trainer_tp=1, num_engines=1)
    config = OmegaConf.create({"defaults": str(BASE)})
    for key, value in {**recipe._overrides(), **recipe.others}.items():
        OmegaConf.update(config, key, value, force_add=True)
    config.checkpointing = {"enabled": False}
    config.logger.log_dir = str(folder / "logs")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(OmegaConf.to_container(config)))
    return path


@pytest.fixture(scope="module")
def runs(cluster: None, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Backend -> the folder with its logs."""
    folder = tmp_path_factory.mktemp("launcher")
    grpo_task.register()
    ACTOR_ENVIRONMENT_REGISTRY.update(dict.fromkeys(ACTOR_ENVIRONMENT_REGISTRY, PY_EXECUTABLES.SYSTEM))
    grpo_task.write_model(folder / "model", "qwen3", seed=0)
    grpo_task.write_prompts(folder / "prompts.jsonl", grpo_run.PROMPTS * 8)
    path = write_recipe(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_RL", str(checkout))
        # The session's Ray, which believes in GPUs, runs already.
        patch.setattr(virtual_cluster, "init_ray", lambda: None)
        folders = {}
        for number, backend in enumerate(("reshard", "nemo_rl"), start=1):
            with stopped_afterwards(patch):
                assert grpo_qwen.main(["--config", str(path), f"refit.backend={backend}", "refit.deadline_s=60"]) == 0
            folders[backend] = folder / "logs" / f"exp_{number:03d}"
        yield folders


@contextmanager
def stopped_afterwards(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """NeMo RL's launchers leave trainers to the end of their process; here the next run needs their GPUs."""
    made: list[launched.Parts] = []
    train = launched.train

    def noted(parts: launched.Parts, task: launched.Task) -> None:
        made.append(parts)
        train(parts, task)

    patch.setattr(launched, "train", noted)
    yield
    patch.setattr(launched, "train", train)
    for parts in made:
        parts.policy.shutdown()
        for each in parts.clusters:
            each.shutdown()


@pytest.fixture(scope="module")
def compared(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    picture = tmp_path_factory.mktemp("compared") / "refits.png"
    summaries = compare_runs(list(runs.values()), picture, Console(quiet=True))
    assert picture.read_bytes().startswith(b"\x89PNG")
    return {summary["backend"]: summary for summary in summaries}


def test_what_a_run_leaves(runs: dict[str, Path]) -> None:
    for backend, folder in runs.items():
        assert yaml.safe_load((folder / "config.yaml").read_text())["refit"]["backend"] == backend
        assert "torch" in json.loads((folder / "environment.json").read_text())["versions"]


def test_compare_reads_what_nemo_rl_logged_of_both(compared: dict[str, dict[str, Any]]) -> None:
    ours, theirs = compared["reshard"], compared["nemo_rl"]
    # NeMo RL's timer is what both have; the seconds are real ones.
    assert ours["measure"] == theirs["measure"] == LOOP_SECONDS
    for summary in (ours, theirs):
        assert (summary["steps"], summary["refits"]) == (STEPS, STEPS)
        assert 0 < summary["refit_seconds"]["min"] < 60
        assert summary["reward"] is not None
        assert summary["token_mult_prob_error"]["worst"] < 1.001
    assert sum(ours["phases"].values()) > 0
    assert ours["bytes_received_sum"] > 0
    assert theirs["phases"] is None
    assert theirs["bytes_received_sum"] is None


def test_runs_of_this_package_alone_are_measured_by_its_own_seconds(runs: dict[str, Path], tmp_path: Path) -> None:
    (summary,) = compare_runs([runs["reshard"]], tmp_path / "one.png", Console(quiet=True))
    assert summary["measure"] == "refit/seconds"
