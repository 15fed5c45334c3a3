"""The environment that the driver, Ray's workers and vLLM's processes share, so that all find the same stand-ins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nemo_rl_reshard.orchestration.cpu_environment import CpuEnvironment
from stand_ins import import_hooks

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]


def import_folders(checkout: Path, private_vllm: Path) -> list[Path]:
    """In the order in which they are searched, before any installed package."""
    tests = REPOSITORY / "tests"
    cpu_engine = REPOSITORY / "examples" / "cpu_engine"
    return [HERE / "site", private_vllm, checkout, REPOSITORY, tests, tests / "nemo_rl", cpu_engine]


def enter(checkout: Path, private_vllm: Path) -> None:
    """Make this process the driver: NeMo RL hands a copy of its whole environment to every worker it starts."""
    folders = import_folders(checkout, private_vllm)
    environment = CpuEnvironment(
        python_path=folders,
        others={
            # Nothing may appear in the checkout, bytecode included.
            "PYTHONDONTWRITEBYTECODE": "1",
            # NeMo RL would start its vLLM workers in environments of their own, which it builds from the network.
            "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
            # A patched file's lock and the compiler's cache stay out of the home folder.
            "VLLM_CACHE_ROOT": str(private_vllm / "cache"),
            "CPU_ENGINE_LIVE_WEIGHTS": "1",
            "WANDB_MODE": "disabled",
        },
    )
    os.environ.update(environment.variables())
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(folder) for folder in folders if str(folder) not in sys.path]
    # Python read the PYTHONPATH of this process at its start, before this; do what it would have done.
    import_hooks.install()
