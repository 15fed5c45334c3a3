"""The whole example on a small model: both backends in one invocation, real Ray, trainers and vLLM engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALL = (
    "grpo.num_steps=4",
    "grpo.stale_steps=[2]",
    "grpo.answers_per_question=8",
    "model.hidden_size=128",
    "model.intermediate_size=192",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=32",
    "policy.learning_rate=1e-3",
)
REQUIRED = (
    "step",
    "time_s",
    "reward/mean",
    "loss",
    "timing/train/prepare_for_generation/transfer_and_update_weights",
    "timing/train/generation",
    "timing/train/policy_training",
    "refit/backend",
    "refit/version",
    "refit/seconds",
    "refit/bytes_received_max",
    "refit/bytes_received_sum",
    "refit/direct_share",
    "refit/fraction_of_floor",
    "refit/peak_extra_bytes",
    "logprob_gap/mean_abs",
    "logprob_gap/max_abs",
    *(
        f"refit/seconds_{phase}"
        for phase in ("declare", "pack", "network", "exchange", "leftover", "install", "verify")
    ),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Backend -> steps."""
    folder = tmp_path_factory.mktemp("grpo")
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "examples" / "grpo_qwen.py",
            "--config",
            ROOT / "configs" / "grpo_qwen_cpu.yaml",
            "refit.backend=[reshard,gather_broadcast]",
            "refit.verify=full",
            f"logger.run_dir={folder}",
            *SMALL,
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "plot: " in done.stdout
    assert (folder / "refit_timings.png").exists()
    steps = {}
    for backend in ("reshard", "gather_broadcast"):
        for name in ("config.yaml", "environment.json", "plan.json"):
            assert (folder / backend / name).exists()
        lines = (folder / backend / "metrics.jsonl").read_text().splitlines()
        steps[backend] = [json.loads(line) for line in lines]
    return steps


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.parametrize("backend", ["reshard", "gather_broadcast"])
def test_engines_follow_the_trainers_after_every_refit_and_not_without_one(
    runs: dict[str, list[dict[str, Any]]], backend: str
) -> None:
    steps = runs[backend]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    fresh = [step["logprob_gap/mean_abs"] for step in steps if not step["refit/skipped"]]
    (stale,) = [step["logprob_gap/mean_abs"] for step in steps if step["refit/skipped"]]
    assert max(fresh) <= 1e-4
    assert stale >= 5 * max(fresh)


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.parametrize("backend", ["reshard", "gather_broadcast"])
def test_every_step_has_every_key(runs: dict[str, list[dict[str, Any]]], backend: str) -> None:
    for step in runs[backend]:
        assert [key for key in REQUIRED if key not in step] == []
        if not step["refit/skipped"]:
            assert [key for key in REQUIRED if step.get(key) is None] == []
            assert step["refit/version"] == step["step"]
            assert step["refit/backend"] == backend


@pytest.mark.engine
@pytest.mark.ray
def test_both_backends_start_from_the_same_weights_and_reshard_moves_fewer_bytes(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    reshard, conventional = runs["reshard"][0], runs["gather_broadcast"][0]
    # Before any training both engines sample a nearly uniform policy; the trainers were put back bit for bit.
    assert reshard["reward/mean"] == pytest.approx(conventional["reward/mean"], abs=0.1)
    assert reshard["refit/bytes_received_sum"] < conventional["refit/bytes_received_sum"] / 2
    assert reshard["refit/direct_share"] == 1.0
    assert conventional["refit/direct_share"] == 0.0
