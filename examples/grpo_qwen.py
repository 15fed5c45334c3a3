"""GRPO on Qwen3 with refits by nemo_rl_reshard: under NeMo RL on GPUs, or in a small loop of its own on any CPU.

    python examples/grpo_qwen.py --config configs/grpo_qwen_cpu.yaml refit.backend=reshard refit.verify=sample
    python examples/grpo_qwen.py --config configs/nemo_rl/grpo-qwen3-1.7b-1n8g-fsdp2.yaml refit.backend=reshard

The configuration decides which: one that inherits NeMo RL's files, or has sections of their form, runs NeMo RL's own
`setup` and GRPO loop with our synchronizer attached (docs/nemo-rl.md). In the CPU loop several backends
(`"refit.backend=[reshard,gather_broadcast]"`) train one after the other from the same weights, with trainers and
engines staying up, and are then compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_launch.recognise import is_recipe
from rich.console import Console

from nemo_rl_reshard.cli.requirements import EnvironmentLacksError
from nemo_rl_reshard.errors import ConfigError, ReshardError


def main(arguments: Sequence[str] | None = None) -> int:
    """Train. Returns the exit code: 0, 1 if a refit failed, 2 for a faulty configuration, 3 if something is missing."""
    parser = argparse.ArgumentParser(description="GRPO on Qwen3 with resharded refits")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    console = Console()
    # Only what the configuration asks for is imported: NeMo RL's environment lacks what the CPU loop needs, and
    # the other way round.
    if is_recipe(options.config):
        from nemo_rl_launch.launch import launch
    else:
        from grpo.launch import launch
    try:
        launch(options.config, options.overrides, console)
    except ReshardError as fault:
        console.print(str(fault), style="red", markup=False, soft_wrap=True)
        return 2 if isinstance(fault, ConfigError) else 3 if isinstance(fault, EnvironmentLacksError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
