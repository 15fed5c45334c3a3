"""The example's task, tokenizer and batches."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo.batch import Batch, Sample
from grpo.task import KINDS, questions, reward
from grpo.tokenizer import BEGIN, END, PAD, VOCABULARY, decode, encode


def question(kind: str):
    return next(each for each in questions(12, seed=0, step=0) if each.kind == kind)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"01234567", 1.0),
        (b"00000000", 1 / 8),
        (b"0123abcd", 0.5),
        (b"", 0.0),
        (b"abcdefgh", 0.0),
        (b"xxxxxxxx01234567", 0.0),
    ],
)
def test_reward_counts_different_characters_of_the_right_kind(answer: bytes, expected: float) -> None:
    assert reward(question("digit"), list(answer), length=8) == expected


def test_reward_stops_at_the_end_token_and_ignores_what_is_no_byte() -> None:
    assert reward(question("digit"), [PAD, ord("1"), BEGIN, ord("2"), END, ord("3")], length=4) == 0.5


def test_questions_are_fixed_by_seed_and_step_and_cover_every_kind() -> None:
    assert questions(6, 1, 2) == questions(6, 1, 2)
    assert questions(30, 1, 2) != questions(30, 1, 3)
    assert questions(30, 1, 2) != questions(30, 2, 2)
    assert {each.kind for each in questions(len(KINDS), 0, 0)} == set(KINDS)


def test_tokens_round_trip_and_stay_inside_the_vocabulary() -> None:
    text = "digit: 0-9 é"
    assert decode(encode(text)) == text.encode()
    assert max(BEGIN, END, PAD) == VOCABULARY - 1


def test_a_batch_aligns_logprobs_with_the_tokens_they_predict() -> None:
    batch = Batch.of(
        [
            Sample(prompt=[BEGIN, 1, 2], answer=[3, END], sampled_logprobs=[-0.1, -0.2], advantage=1.0),
            Sample(prompt=[BEGIN, 4], answer=[5], sampled_logprobs=[-0.3], advantage=-1.0),
        ]
    )
    assert batch.tokens.tolist() == [[BEGIN, 1, 2, 3, END], [BEGIN, 4, 5, PAD, PAD]]
    # Column i speaks of token i + 1.
    assert batch.mask.tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert torch.equal(batch.sampled, torch.tensor([[0, 0, -0.1, -0.2], [0, -0.3, 0, 0]]))
    assert batch.num_tokens == 3
    second = batch.rows(torch.tensor([1]))
    assert (second.tokens.tolist(), second.advantages.tolist()) == ([[BEGIN, 4, 5, PAD, PAD]], [[-1.0]])
