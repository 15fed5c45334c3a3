"""NeMo RL's `setup` and `grpo_train`, unmodified, with this package's refit: 4 trainers (FSDP2 x TP), two engines.

B13, B14, B65 (answers of the weights just trained), B61 to B64 (what the loop sees and logs).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpo_run
import pytest
import ray
from grpo_run import MAX_GAP, Run
from stand_ins import in_actors

from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach
from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer

pytestmark = pytest.mark.timeout(900)

FAMILY = "qwen2"
"""Not Qwen3: NeMo RL's trainers sum no gradients of its q_norm and k_norm over tensor-parallel ranks. The copies
drift apart, and with them trainers from engines (by about 0.001), however weights are moved."""
STEPS = 10
LEFT_OUT = 9
"""The step, counted from 1 as NeMo RL counts, before which the refit is left out."""
LABEL = "prepare_for_generation/transfer_and_update_weights"


class LeavesOneOut:
    """NeMo RL's `WeightSynchronizer`: another one, which is not asked the `left_out`-th time."""

    def __init__(self, synchronizer: ReshardWeightSynchronizer, left_out: int) -> None:
        self._synchronizer = synchronizer
        self._remaining = left_out

    @property
    def is_stale(self) -> bool:
        return self._synchronizer.is_stale

    def sync_weights(self, **named: Any) -> dict[str, float]:
        self._remaining -= 1
        return self._synchronizer.sync_weights(**named) if self._remaining else {}

    def shutdown(self) -> None:
        self._synchronizer.shutdown()


@pytest.fixture(scope="module")
def run(cluster: None, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """After STEPS steps."""
    started = Run.set_up(grpo_run.recipe(tmp_path_factory.mktemp("grpo"), STEPS), checkout, FAMILY)
    try:
        attached = attach(started.policy, started.generation, started.clusters, started.config, logger=started.logger)
        assert attached is not None
        started.generation.weight_synchronizer = LeavesOneOut(attached, LEFT_OUT)
        started.train()
        started.generation.weight_synchronizer = attached
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def scalars(run: Run) -> dict[str, dict[int, float]]:
    """What NeMo RL's logger holds, read before any later test adds to it."""
    return grpo_run.logged(run.log_folder)


def test_the_reward_rises(scalars: dict[str, dict[int, float]]) -> None:
    reward = scalars["train/reward"]
    assert list(reward) == list(range(1, STEPS + 1))
    # Whoever trains on answers of older weights, as in step LEFT_OUT, may well lose what was won.
    assert reward[LEFT_OUT - 1] >= reward[1] + 0.15


def test_both_sides_agree_on_every_answer_after_a_refit_and_not_without_one(
    run: Run, scalars: dict[str, dict[int, float]]
) -> None:
    gaps = {step: float(batch.gap().mean()) for step, batch in enumerate(grpo_run.batches(run.log_folder), 1)}
    assert list(gaps) == list(range(1, STEPS + 1))
    stale = gaps.pop(LEFT_OUT)
    assert max(gaps.values()) <= MAX_GAP
    assert stale >= 1000 * max(gaps.values())
    # NeMo RL's own figures say the same: the mean of exp(|difference|), and a divergence.
    error = dict(scalars["train/token_mult_prob_error"])
    divergence = dict(scalars["train/gen_kl_error"])
    assert error.pop(LEFT_OUT) > 1 + 1000 * MAX_GAP
    assert max(error.values()) < 1 + 2 * MAX_GAP
    assert divergence.pop(LEFT_OUT) > 100 * max(divergence.values())


def test_every_refit_is_in_nemo_rls_log(scalars: dict[str, dict[int, float]]) -> None:
    refitted = [step for step in range(1, STEPS + 1) if step != LEFT_OUT]
    for name in ("seconds", "bytes_received_sum", "direct_share", "fraction_of_floor", "seconds_network"):
        assert list(scalars[f"refit/{name}"]) == refitted
    assert list(scalars["refit/version"].values()) == list(range(1, STEPS))
    assert min(scalars["refit/direct_share"].values()) > 0.2
    whole = scalars[f"timing/train/{LABEL}"]
    assert list(whole) == refitted
    for name, seconds in scalars.items():
        if name.startswith(f"timing/train/{LABEL}/reshard_"):
            assert all(seconds[step] <= whole[step] for step in seconds), name
    assert any(name.startswith(f"timing/train/{LABEL}/reshard_") for name in scalars)
    assert any(name.startswith("timing/setup/reshard_") for name in scalars)


def test_the_trainers_saved_their_checkpoint(run: Run) -> None:
    assert (Path(run.config.checkpointing["checkpoint_dir"]) / f"step_{STEPS}" / "policy" / "weights").is_dir()


def test_a_refit_that_fails_stops_the_loop(run: Run, scalars: dict[str, dict[int, float]]) -> None:
    trainer = run.policy.worker_group.workers[1]
    tensor = "model.layers.1.mlp.down_proj.weight"
    ray.get(trainer.__ray_call__.remote(in_actors.plan_fault, "raise", tensor), timeout=60)
    run.config.grpo.max_num_steps = STEPS + 1
    with pytest.raises(RefitError, match=f"planned to fail at {tensor}"):
        run.train()
    assert run.generation.weight_synchronizer.is_stale
    assert list(grpo_run.logged(run.log_folder)["train/reward"]) == list(range(1, STEPS + 1))
