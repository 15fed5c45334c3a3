"""The task: the prompt names a kind of character; answer with `length` different characters of that kind.

A model with random weights learns it in a few GRPO steps, and a set tells right from wrong. That the characters must
differ keeps the best policy random, so weights and log-probabilities go on changing until the last step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.tokenizer import decode, encode

KINDS: dict[str, frozenset[int]] = {
    "lower": frozenset(b"abcdefghijklmnopqrstuvwxyz"),
    "upper": frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "digit": frozenset(b"0123456789"),
}


@dataclass(frozen=True)
class Question:
    """One prompt: its text, its tokens and the kind of character that its answer should consist of."""

    text: str
    tokens: tuple[int, ...]
    kind: str


def questions(count: int, seed: int, step: int) -> list[Question]:
    """`count` questions for one step, kinds in turn, in an order fixed by (seed, step)."""
    kinds = [list(KINDS)[index % len(KINDS)] for index in range(count)]
    random.Random(f"{seed}:{step}").shuffle(kinds)
    return [Question(text := f"{kind}:", tuple(encode(text)), kind) for kind in kinds]


def reward(question: Question, answer: Sequence[int], length: int) -> float:
    """Different characters of the right kind among the first `length`, as a share of `length`: 0 to 1."""
    return len(KINDS[question.kind] & set(decode(answer)[:length])) / length
