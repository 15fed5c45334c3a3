"""PolicyTrainer: one rank of the trainers. FSDP2 over tensor parallel, AdamW on fp32 masters, GRPO's clipped loss."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from grpo.batch import Batch, Sample
from grpo.loss import clipped_loss, token_logprobs
from grpo.model import load_checkpoint
from grpo.parallel import gradient_norm, parallelize


class PolicyTrainer:
    """Rank `rank` of dp * tp; tp runs fastest. All ranks must call the same methods in the same order."""

    def __init__(self, rank: int, store: dist.Store, checkpoint: Path, section: Mapping[str, Any]) -> None:
        """Join the trainers' own process group through `store` and cut the checkpoint over it."""
        torch.set_num_threads(1)
        dp, tp = section["dp"], section["tp"]
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=dp * tp, timeout=timedelta(seconds=section["timeout_s"])
        )
        self.mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        self._section = section
        self.model = load_checkpoint(checkpoint)
        parallelize(self.model, self.mesh, getattr(torch, section["compute_dtype"]))
        self._initial = [_local(parameter).clone() for parameter in self.model.parameters()]
        self.restart()

    def restart(self) -> None:
        """Go back to the weights of the checkpoint, with a fresh optimizer, so that two backends start alike."""
        with torch.no_grad():
            for parameter, initial in zip(self.model.parameters(), self._initial, strict=True):
                _local(parameter).copy_(initial)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self._section["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0
        )

    def train_step(self, plain: Sequence[Mapping[str, Any]], seed: int) -> dict[str, float]:
        """One GRPO step over all samples of the step, of which each dp rank computes its share.

        Also measures, before the first update, how far the engine's log-probabilities are from this trainer's: the
        weights are those that the last refit sent. Returns sums and maxima over all ranks.
        """
        start_s = time.perf_counter()
        dp = self.mesh["dp"]
        own = [Sample(**sample) for sample in plain[dp.get_local_rank() :: dp.size()]]
        batch = Batch.of(own)
        with torch.no_grad():
            old = token_logprobs(self._logits(batch.tokens), batch.tokens)
        gap = ((old - batch.sampled).abs() * batch.mask).sum()
        gap_max = ((old - batch.sampled).abs() * batch.mask).max()
        sums = torch.zeros(4)  # loss, clipped tokens, importance weights, tokens
        norms = []
        order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))
        for rows in order.chunk(self._section["minibatches"]):
            norm = self._update(batch.rows(rows), old[rows], sums)
            norms.append(float(norm))
        totals = torch.cat([sums, gap[None], torch.tensor([batch.num_tokens])])
        dist.all_reduce(totals, group=dp.get_group())
        dist.all_reduce(gap_max, op=dist.ReduceOp.MAX, group=dp.get_group())
        loss, clipped, weight, tokens, gap_sum, num_tokens = totals.tolist()
        return {
            "loss": loss / tokens,
            "train/clipped_share": clipped / tokens,
            "train/importance_mean": weight / tokens,
            "train/gradient_norm": sum(norms) / len(norms),
            "train/seconds": time.perf_counter() - start_s,
            "logprob_gap/mean_abs": gap_sum / num_tokens,
            "logprob_gap/max_abs": float(gap_max),
        }

    def _update(self, batch: Batch, old: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """One optimizer step on one mini batch; adds its figures to `sums`."""
        section, dp = self._section, self.mesh["dp"]
        tokens = torch.tensor(batch.num_tokens)
        dist.all_reduce(tokens, group=dp.get_group())
        current = token_logprobs(self._logits(batch.tokens), batch.tokens)
        terms = clipped_loss(
            current,
            old,
            batch.sampled,
            batch.advantages,
            batch.mask,
            section["clip_low"],
            section["clip_high"],
            section["max_importance_weight"],
        )
        self._optimizer.zero_grad()
        # FSDP2 averages gradients over dp; the loss is a mean over the tokens of all dp ranks.
        (terms.loss_sum * dp.size() / tokens).backward()
        norm = gradient_norm(list(self.model.parameters()), self.mesh)
        scale = torch.clamp(section["max_gradient_norm"] / (norm + 1e-6), max=1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                _local(parameter.grad).mul_(scale)
        self._optimizer.step()
        sums += torch.tensor([float(terms.loss_sum.detach()), terms.clipped_tokens, terms.weight_sum, batch.num_tokens])
        return norm

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits

    def close(self) -> None:
        """Leave the trainers' process group."""
        dist.destroy_process_group()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a parameter or gradient, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
