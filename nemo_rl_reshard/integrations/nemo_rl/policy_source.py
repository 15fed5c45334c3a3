"""The Source of one NeMo RL policy worker: its live model, whichever of NeMo RL's DTensor workers holds it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.sources.dtensor import DTensorSource


def source_of_policy(worker: Any, rank: int) -> DTensorSource:
    """A source for the model that `worker` (a DTensor policy worker, or one that looks like it) trains.

    `rank` is the worker's rank in the refit world; trainers come first there, so it is also its `torch.distributed`
    rank, which the tensors' device meshes speak of. Raises DeclarationError listing everything that cannot be
    declared.
    """
    model = getattr(worker, "model", None)
    if not isinstance(model, torch.nn.Module):
        raise DeclarationError(
            f"{type(worker).__name__} of rank {rank} holds no module in `model`; a refit reads a DTensor policy worker"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != rank:
        raise DeclarationError(
            f"refit rank {rank} was given to the policy worker of torch.distributed rank {dist.get_rank()}; its "
            "meshes count in the latter, so trainers must be numbered by it"
        )
    return DTensorSource.from_model(model, rank)
