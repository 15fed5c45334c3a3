"""The checkout imports with the stand-ins, and shows nobody else a false version."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

ENTRY_POINTS = (
    "nemo_rl.algorithms.grpo",
    "nemo_rl.algorithms.grpo_sync",
    "nemo_rl.algorithms.distillation",
    "nemo_rl.algorithms.ppo",
    "nemo_rl.algorithms.single_controller",
    "nemo_rl.algorithms.single_controller_utils.setup",
    "nemo_rl.models.generation.vllm.vllm_worker",
    "nemo_rl.models.generation.vllm.vllm_worker_async",
    "nemo_rl.models.generation.vllm.vllm_backend",
    "nemo_rl.models.policy.workers.dtensor_policy_worker",
    "nemo_rl.weight_sync.factory",
)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_points_import_from_the_checkout(name: str, checkout: Path) -> None:
    module = importlib.import_module(name)
    assert Path(str(module.__file__)).is_relative_to(checkout)


def test_the_true_version_of_transformers_is_back_after_the_import() -> None:
    importlib.import_module("nemo_rl.models.policy")
    assert Version(transformers.__version__) >= Version("5.16")
    assert "nemo_rl.models.policy" in sys.modules


@pytest.mark.parametrize("loop", ["distillation", "grpo_sync", "ppo"])
def test_other_loops_refit_by_the_same_function(loop: str) -> None:
    """So a synchronizer that is attached serves them all."""
    grpo = importlib.import_module("nemo_rl.algorithms.grpo")
    module = importlib.import_module(f"nemo_rl.algorithms.{loop}")
    assert module.refit_policy_generation is grpo.refit_policy_generation
