"""The checks every transport makes before it starts an operation, so that wrong use fails alike on all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_rl_reshard.errors import TransportError

CPU = torch.device("cpu")


def check_buffer(buffer: Tensor, what: str, device: torch.device = CPU) -> None:
    """Raise TransportError unless `buffer` is a contiguous 1-D uint8 tensor on `device`.

    A transport takes pointer and length: strides would be ignored on both ends, silently.
    """
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise TransportError(
            f"{what} needs a contiguous 1-D uint8 buffer, not {str(buffer.dtype).removeprefix('torch.')} of shape "
            f"{tuple(buffer.shape)} and strides {buffer.stride()}"
        )
    if buffer.device != device:
        raise TransportError(f"{what} needs a buffer on {device}, not on {buffer.device}")


def check_peer(peer: int, rank: int, size: int, what: str) -> None:
    """Raise TransportError unless `peer` is another rank of the world."""
    if not 0 <= peer < size or peer == rank:
        raise TransportError(f"{what}: rank {peer} is not another rank of a world of {size} (this is rank {rank})")


def check_members(ranks: tuple[int, ...], rank: int, size: int, what: str) -> None:
    """Raise TransportError unless `ranks` are distinct ranks of the world and `rank` is one of them."""
    if len(set(ranks)) != len(ranks) or not all(0 <= member < size for member in ranks):
        raise TransportError(f"{what}: {ranks} are not distinct ranks of a world of {size}")
    if rank not in ranks:
        raise TransportError(f"{what}: rank {rank} is not among the members {ranks}")


def check_gather(output: Tensor, own: Tensor, ranks: tuple[int, ...], device: torch.device = CPU) -> None:
    """Raise TransportError unless `output` holds exactly one `own` per member."""
    check_buffer(output, "all_gather output", device)
    check_buffer(own, "all_gather own", device)
    if output.numel() != own.numel() * len(ranks):
        raise TransportError(
            f"all_gather output has {output.numel()} bytes; {len(ranks)} members of {own.numel()} bytes need "
            f"{own.numel() * len(ranks)}"
        )
