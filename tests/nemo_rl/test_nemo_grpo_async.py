"""NeMo RL's `async_grpo_train`, unmodified, with this package's refit between trainers and an asynchronous engine.

Here answers are up to one step older than the weights they train, so agreement is asked for by version: every answer
has the log-probabilities of exactly the weights that one refit delivered. B61 to B66, and failures as B67 wants them.
"""

from __future__ import annotations

from pathlib import Path

import grpo_run
import pytest
import torch
from grpo_run import MAX_GAP
from grpo_versions import FAULTY, RemembersWeights, Weights, log_probabilities, running, spoil

from nemo_rl_reshard.errors import RefitError

pytestmark = pytest.mark.timeout(900)

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo")


@pytest.fixture(scope="module")
def versions(cluster: None, checkout: Path, folder: Path) -> list[Weights]:
    """Weights by version, after STEPS steps; the refit after one more fails, and ends loop and workers."""
    with running(folder, checkout, STEPS + 2) as (run, attached):
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
        gaps = [batch.gap(log_probabilities(weights, batch.tokens)) for weights in versions]
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
    with running(tmp_path, checkout, STEPS + 2) as (run, attached):
        spoil(run.policy.worker_group.workers[-1])
        returned: list[None] = []
        with pytest.raises(RefitError, match=f"planned to fail at {FAULTY}"), attached:
            returned.append(run.train_async())
    assert returned == [None]
    assert "Policy generation refit failed" in capfd.readouterr().out
    assert grpo_run.logged(tmp_path).get("train/reward") is None
