"""NeMo RL's `async_grpo_train` with `in_flight_weight_updates`: engines are refitted amid answers, and go on with them.

Such an answer has tokens of two versions of the weights, and what each token's probability has to be is still exact: up
to the refit that of the older weights, from then on that of the newer ones on the keys and values that the older left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpo_run
import pytest
import torch
from grpo_run import MAX_GAP, Batch
from grpo_versions import RemembersWeights, Weights, chosen, log_probabilities, plain_model, running

pytestmark = pytest.mark.timeout(900)

STEPS = 5
LENGTH, AT_ONCE = 48, 8
"""Tokens of an answer, and how many of a step's 192 the engine works on at a time: that takes longer than the rest of a
step, so that refits find it at work."""
MAX_KL = 0.01
"""Of the trainers' from the engine's probabilities, which are up to one step old; five steps old it would be 0.03."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves: its folder, the weights by version, and what each step trained on."""

    folder: Path
    versions: list[Weights]
    batches: list[Batch]


@pytest.fixture(scope="module")
def outcome(cluster: None, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("grpo")
    others = {
        "grpo.async_grpo.in_flight_weight_updates": True,
        "policy.generation.max_new_tokens": LENGTH,
        "policy.generation.vllm_kwargs.max_num_seqs": AT_ONCE,
        "policy.optimizer.kwargs.lr": 3e-4,
    }
    with running(folder, checkout, STEPS, others) as (run, attached), attached:
        remembers = RemembersWeights(attached, run)
        run.generation.weight_synchronizer = remembers
        run.train_async()
    return Outcome(folder, remembers.versions, list(grpo_run.batches(folder)))


def test_tokens_have_the_old_weights_probability_up_to_a_refit_and_the_new_ones_after(outcome: Outcome) -> None:
    """B63, B65: no token is of half-written weights, although the engine did not stand idle."""
    assert len(outcome.batches) == STEPS
    weights = outcome.versions
    first, *others = outcome.batches
    assert first.gap(log_probabilities(weights[0], first.tokens)).max() <= MAX_GAP
    num_mixed = 0
    for (older, newer), batch in zip(pairwise(weights[:STEPS]), others, strict=True):
        by_one = [log_probabilities(each, batch.tokens) for each in (older, newer)]
        is_mixed = _least_gap(batch, by_one) > MAX_GAP
        if is_mixed.any():
            mixed = batch.rows(is_mixed)
            by_two = list(_by_two(older, newer, mixed))
            assert _least_gap(mixed, by_two).max() <= MAX_GAP
        num_mixed += int(is_mixed.sum())
    assert num_mixed > 0


def test_refits_are_in_nemo_rls_log_and_the_two_sides_stay_close(outcome: Outcome) -> None:
    scalars = grpo_run.logged(outcome.folder)
    steps = list(range(1, STEPS + 1))
    assert list(scalars["refit/seconds"]) == steps
    assert len(set(scalars["refit/version"].values())) == STEPS
    assert list(scalars["train/gen_kl_error"]) == steps
    assert max(scalars["train/gen_kl_error"].values()) <= MAX_KL


def _least_gap(batch: Batch, candidates: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([batch.gap(each) for each in candidates]).min(0).values


def _by_two(older: Weights, newer: Weights, batch: Batch) -> Iterator[torch.Tensor]:
    """`log_probabilities` with a refit after so many tokens, for each count at which an answer can meet one."""
    first, second = plain_model(older), plain_model(newer)
    read = batch.tokens[:, :-1]
    begin = int(batch.is_answer.nonzero()[:, 1].min())
    for count in range(begin, read.shape[1]):
        with torch.no_grad():
            begun = first(read[:, :count], use_cache=True)
            rest = second(read[:, count:], past_key_values=begun.past_key_values)
        yield chosen(torch.cat([begun.logits, rest.logits], 1), batch.tokens)
