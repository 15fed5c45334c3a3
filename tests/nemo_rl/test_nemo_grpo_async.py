"""NeMo RL's `async_grpo_train`, unmodified, with this package's refit between trainers and an asynchronous engine.

Here answers are up to one step older than the weights they train, so agreement is asked for by version: every answer
has the log-probabilities of exactly the weights that one refit delivered. B61 to B66, and failures as B67 wants them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpo_run
import grpo_task
import pytest
import ray
import torch
from grpo_run import MAX_GAP, Batch, Run
from stand_ins import in_actors

from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach
from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer

pytestmark = pytest.mark.timeout(900)

FAMILY = "qwen3"
STEPS = 4
FAULTY = "model.layers.1.mlp.down_proj.weight"
Weights = dict[str, torch.Tensor]


class RemembersWeights:
    """NeMo RL's `WeightSynchronizer`: another one, and the trainers' weights at every refit; one refit it spoils."""

    def __init__(self, synchronizer: ReshardWeightSynchronizer, run: Run, spoilt: int) -> None:
        self._synchronizer = synchronizer
        self._trainers = run.policy.worker_group.workers
        self._spoilt = spoilt
        self.versions: list[Weights] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """The loop sends the engines' handle, and this with it, to the actor that collects answers."""
        return _itself, (self._synchronizer,)

    @property
    def is_stale(self) -> bool:
        return self._synchronizer.is_stale

    def sync_weights(self, **named: Any) -> dict[str, float]:
        if len(self.versions) == self._spoilt:
            spoil(self._trainers[-1])
        scalars = self._synchronizer.sync_weights(**named)
        whole = [each.__ray_call__.remote(in_actors.full_tensors) for each in self._trainers]
        self.versions.append(in_actors.from_plain(ray.get(whole, timeout=60)[0]))
        return scalars

    def shutdown(self) -> None:
        self._synchronizer.shutdown()


def _itself(synchronizer: ReshardWeightSynchronizer) -> ReshardWeightSynchronizer:
    return synchronizer


def spoil(trainer: Any) -> None:
    """Its next refit fails, after others have begun to write."""
    ray.get(trainer.__ray_call__.remote(in_actors.plan_fault, "raise", FAULTY), timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo")


@contextmanager
def running(folder: Path, checkout: Path) -> Iterator[tuple[Run, ReshardWeightSynchronizer]]:
    """After `setup` and `attach`."""
    recipe = grpo_run.recipe(
        folder,
        STEPS + 2,
        num_trainers=2,
        trainer_tp=1,
        num_engines=1,
        is_async=True,
        others={"grpo.async_grpo.enabled": True, "loss_fn.use_importance_sampling_correction": True},
    )
    started = Run.set_up(recipe, checkout, FAMILY)
    try:
        attached = attach(started.policy, started.generation, started.clusters, started.config, logger=started.logger)
        assert attached is not None
        yield started, attached
    finally:
        started.stop()


@pytest.fixture(scope="module")
def versions(cluster: None, checkout: Path, folder: Path) -> list[Weights]:
    """Weights by version, after STEPS steps; the refit after one more fails, and ends loop and workers."""
    with running(folder, checkout) as (run, attached):
        remembers = RemembersWeights(attached, run, spoilt=STEPS + 1)
        run.generation.weight_synchronizer = remembers
        with pytest.raises(RefitError, match=f"planned to fail at {FAULTY}"):
            run.train_async()
    return remembers.versions


def test_every_answer_is_of_the_weights_that_one_refit_delivered(folder: Path, versions: list[Weights]) -> None:
    batches = list(grpo_run.batches(folder))
    assert len(batches) == STEPS
    assert len(versions) == STEPS + 1
    for version, batch in enumerate(batches):
        gaps = [batch.gap(_log_probabilities(weights, batch)) for weights in versions]
        admitted = torch.stack(gaps[max(version - 1, 0) : version + 1])
        assert admitted.min(0).values.max() <= MAX_GAP
        others = [gap.mean() for number, gap in enumerate(gaps) if number not in (version - 1, version)]
        assert min(others) >= 1000 * MAX_GAP


def test_refits_and_their_time_are_in_nemo_rls_log(folder: Path, versions: list[Weights]) -> None:
    scalars = grpo_run.logged(folder)
    steps = list(range(1, STEPS + 1))
    assert list(scalars["train/reward"]) == steps
    # The first refit ends before the first step, and this loop logs none of it.
    assert len(set(scalars["refit/version"].values())) == STEPS
    assert list(scalars["refit/seconds"]) == steps
    whole = scalars["timing/train/weight_sync"]
    assert all(scalars["refit/seconds"][step] <= whole[step] for step in steps)


def test_the_first_refits_failure_is_raised_though_the_loop_prints_it_and_returns(
    cluster: None, checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Started anew: a loop that returns so drops an actor, which takes the engines with it."""
    with running(tmp_path, checkout) as (run, attached):
        spoil(run.policy.worker_group.workers[-1])
        returned: list[None] = []
        with pytest.raises(RefitError, match=f"planned to fail at {FAULTY}"), attached:
            returned.append(run.train_async())
    assert returned == [None]
    assert "Policy generation refit failed" in capfd.readouterr().out
    assert grpo_run.logged(tmp_path).get("train/reward") is None


def _log_probabilities(weights: Weights, batch: Batch) -> torch.Tensor:
    """Of every token given those before it, by the plain model; 0 for the first."""
    model = grpo_task.model(FAMILY)
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model.eval()(batch.tokens).logits[:, :-1]
    following = batch.tokens[:, 1:, None]
    found = logits.log_softmax(-1).gather(-1, following).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))
