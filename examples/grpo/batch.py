"""Samples of one step as plain values, and as right-padded tensors that a trainer rank computes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo.tokenizer import PAD


@dataclass(frozen=True)
class Sample:
    """One answer: prompt and answer tokens, the engine's log-probability of each answer token, and its advantage."""

    prompt: list[int]
    answer: list[int]
    sampled_logprobs: list[float]
    advantage: float

    def to_plain(self) -> dict[str, Any]:
        """What travels to a trainer actor."""
        return vars(self)


@dataclass(frozen=True)
class Batch:
    """[batch, length] tokens; everything else is [batch, length - 1], aligned with the tokens that are predicted.

    `mask` is 1 on answer tokens. Padding stands on the right, where causal attention never looks, so no attention
    mask is needed.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    sampled: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        """Pad samples to the longest."""
        length = max(len(sample.prompt) + len(sample.answer) for sample in samples)
        tokens = torch.full((len(samples), length), PAD)
        mask = torch.zeros(len(samples), length - 1)
        sampled = torch.zeros(len(samples), length - 1)
        for row, sample in enumerate(samples):
            start, stop = len(sample.prompt), len(sample.prompt) + len(sample.answer)
            tokens[row, :stop] = torch.tensor(sample.prompt + sample.answer)
            mask[row, start - 1 : stop - 1] = 1
            sampled[row, start - 1 : stop - 1] = torch.tensor(sample.sampled_logprobs)
        return cls(tokens, mask, sampled, torch.tensor([[sample.advantage] for sample in samples]))

    def rows(self, index: torch.Tensor) -> Batch:
        """The samples at `index`."""
        return Batch(self.tokens[index], self.mask[index], self.sampled[index], self.advantages[index])

    @property
    def num_tokens(self) -> float:
        """Answer tokens."""
        return float(self.mask.sum())
