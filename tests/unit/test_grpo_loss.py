"""GRPO's arithmetic against sums done by hand, and the properties that advantages must have."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo.loss import clipped_loss, group_advantages, token_logprobs

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "max_weight": 2.0}


def loss(ratio: list[list[float]], weight: list[list[float]], advantages: list[float], mask: list[list[int]]):
    """The loss for given policy ratios and importance weights, old log-probabilities all being log 0.25."""
    old = torch.full((len(ratio), len(ratio[0])), math.log(0.25))
    current = (old + torch.tensor(ratio).log()).requires_grad_()
    sampled = old - torch.tensor(weight).log()
    terms = clipped_loss(
        current, old, sampled, torch.tensor(advantages)[:, None], torch.tensor(mask, dtype=torch.float32), **CLIP
    )
    return terms, current


def test_loss_equals_the_sum_done_by_hand() -> None:
    # Row 1, advantage 2: ratio 1.5 is clipped to 1.3 (2 * 1.3), 0.5 is not clipped, being worse (2 * 0.5), 1 is 1.
    # Row 2, advantage -1: ratio 0.5 is clipped to 0.8, 1.5 is not clipped, being worse; the third token is padding.
    # Importance weights 0.5 and, truncated from 3, 2.
    terms, _ = loss(
        ratio=[[1.5, 0.5, 1.0], [0.5, 1.5, 9.0]],
        weight=[[1.0, 0.5, 3.0], [1.0, 1.0, 9.0]],
        advantages=[2.0, -1.0],
        mask=[[1, 1, 1], [1, 1, 0]],
    )
    by_hand = (1.0 * 2 * 1.3 + 0.5 * 2 * 0.5 + 2.0 * 2 * 1.0) + (1.0 * -0.8 + 1.0 * -1.5)
    assert float(terms.loss_sum.detach()) == pytest.approx(-by_hand, rel=1e-6)
    assert terms.clipped_tokens == 2
    assert terms.weight_sum == pytest.approx(1 + 0.5 + 2 + 1 + 1)


def test_gradient_pushes_good_answers_up_bad_ones_down_and_stops_at_the_clip() -> None:
    terms, current = loss(
        ratio=[[1.0, 1.5, 1.0], [1.0, 0.5, 1.0]],
        weight=[[1.0] * 3] * 2,
        advantages=[1.0, -1.0],
        mask=[[1, 1, 0], [1, 1, 0]],
    )
    terms.loss_sum.backward()
    assert torch.allclose(current.grad, torch.tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))


def test_importance_weight_carries_no_gradient_and_scales_it() -> None:
    terms, current = loss(ratio=[[1.0, 1.0]], weight=[[0.5, 5.0]], advantages=[1.0], mask=[[1, 1]])
    terms.loss_sum.backward()
    assert torch.allclose(current.grad, torch.tensor([[-0.5, -2.0]]))


def test_advantages_have_mean_0_and_deviation_1_in_each_group() -> None:
    rewards = torch.tensor([[0.0, 0.25, 1.0], [0.5, 0.5, 0.8]])
    advantages = group_advantages(rewards)
    assert torch.allclose(advantages.mean(dim=1), torch.zeros(2), atol=1e-6)
    assert torch.allclose(advantages.std(dim=1, correction=0), torch.ones(2), atol=1e-2)
    assert torch.equal(advantages.argsort(dim=1), rewards.argsort(dim=1))


def test_a_group_without_difference_teaches_nothing() -> None:
    assert torch.equal(group_advantages(torch.full((1, 4), 0.7)), torch.zeros(1, 4))


def test_groups_do_not_see_each_other() -> None:
    low, high = torch.tensor([[0.0, 0.1, 0.2]]), torch.tensor([[0.8, 0.9, 1.0]])
    together = group_advantages(torch.cat([low, high]))
    assert torch.allclose(together[0], together[1], atol=1e-4)


def test_token_logprobs_are_those_of_the_next_token() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [math.log(9.0), 0.0], [5.0, 5.0]]])
    found = token_logprobs(logits, torch.tensor([[0, 1, 1]]))
    # After token 0: 3/4 for token 1. After that: 1/10 for token 1. The last position predicts nothing known.
    assert torch.allclose(found, torch.tensor([[math.log(0.75), math.log(0.1)]]))
