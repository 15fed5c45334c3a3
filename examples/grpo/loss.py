"""GRPO's arithmetic: group advantages, and the clipped loss corrected for the engine having sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossTerms:
    """Sums over the tokens of one micro batch; dividing by the global token count is the caller's."""

    loss_sum: torch.Tensor
    clipped_tokens: float
    weight_sum: float


def group_advantages(rewards: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """[groups, answers per group] rewards -> advantages of the same shape: mean 0 and deviation 1 within a group.

    A group whose rewards are all equal says nothing, and gets zeros.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True, correction=0) + eps)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[batch, length, vocabulary] logits and [batch, length] tokens -> log-probability of tokens[:, 1:].

    Temperature 1 and no truncation of the distribution, as the engines sample.
    """
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def clipped_loss(
    current: torch.Tensor,
    old: torch.Tensor,
    sampled: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    max_weight: float,
) -> LossTerms:
    """GRPO's loss summed over masked tokens. All tensors are [batch, length]; advantages are [batch, 1].

    `current` are log-probabilities of the policy being trained, `old` the trainer's at the start of the step,
    `sampled` the engine's when it drew the tokens. The policy ratio current/old is clipped; the importance weight
    old/sampled, truncated at `max_weight`, makes up for an engine that is not exactly the trainer.
    """
    ratio = torch.exp(current - old)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    weight = torch.exp(old - sampled).clamp(max=max_weight)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    binding = (clipped * advantages < ratio * advantages) & mask.bool()
    return LossTerms(
        loss_sum=-(weight * surrogate * mask).sum(),
        clipped_tokens=float(binding.sum()),
        weight_sum=float((weight * mask).sum()),
    )
