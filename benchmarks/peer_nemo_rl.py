"""NeMo RL's Python reshard on the move of move_512mib.py, its NCCL calls carried by gloo; needs a NeMo RL checkout.

Only `nemo_rl/weight_sync/xferdtensor_python.py` of the checkout is loaded. What it asks of nccl4py and of CUDA streams
is answered by stand-ins; its planning, striping, packing and replica exchange are its own.
"""

from __future__ import annotations

import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peer_modules import PeerMesh, PeerTensor, load_module, without_gpus
from torch.distributed.tensor import Replicate, Shard

NUM_TENSORS, ROWS = 16, 2048
TRAINERS, RECEIVERS = torch.arange(4), torch.arange(4, 8).view(2, 2)


@dataclass(frozen=True)
class PeerRank:
    """`checkout` is the NeMo RL folder, `meeting` a file that does not exist yet."""

    checkout: str
    meeting: str
    mib: int
    repeats: int


class _Communicator:
    """nccl4py's communicator over a gloo group. Point-to-point calls wait at the end of their NCCL group."""

    def __init__(self, group: Any, ranks: list[int], under_way: list[Any]) -> None:
        self._group, self._ranks, self._under_way = group, ranks, under_way

    def send(self, buffer: torch.Tensor, peer: int, **_: Any) -> None:
        self._under_way.append(dist.isend(buffer, self._ranks[peer]))

    def recv(self, buffer: torch.Tensor, peer: int, **_: Any) -> None:
        self._under_way.append(dist.irecv(buffer, self._ranks[peer]))

    def broadcast(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, root: int, **_: Any) -> None:
        if recvbuf.data_ptr() != sendbuf.data_ptr():
            recvbuf.copy_(sendbuf)
        dist.broadcast(recvbuf, self._ranks[root], group=self._group)

    def allgather(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, **_: Any) -> None:
        # In place for NCCL; gloo wants the two apart.
        dist.all_gather_single(recvbuf.reshape(-1), sendbuf.reshape(-1).clone(), group=self._group)

    def split(self, color: int, key: int) -> _Communicator:
        asked: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(asked, (color, key))
        mine = None
        for wanted in sorted({found for found, _ in asked}):
            members = sorted((k, rank) for rank, (found, k) in enumerate(asked) if found == wanted)
            ranks = [rank for _, rank in members]
            group = dist.new_group(sorted(ranks))
            if wanted == color:
                mine = _Communicator(group, ranks, self._under_way)
        assert mine is not None
        return mine


def peer_rank(asked: PeerRank, world: dict[str, Any]) -> list[float]:
    """One rank's process: seconds of each round after the warm-up. Raises AssertionError for a wrong element."""
    rank, size = world["rank"], world["size"]
    dist.init_process_group("gloo", store=dist.FileStore(asked.meeting, size), rank=rank, world_size=size)
    under_way: list[Any] = []
    module = load_module(Path(asked.checkout), "xferdtensor_python")
    group = types.SimpleNamespace(rank=rank, nccl_communicator=_Communicator(None, list(range(size)), under_way))
    columns = (asked.mib << 20) // 4 // NUM_TENSORS // ROWS
    shape = (ROWS, columns)

    def whole(index: int) -> torch.Tensor:
        return torch.arange(ROWS * columns, dtype=torch.float32).view(shape) + index

    half = (rank - 4) % 2

    def slice_of(index: int, values: torch.Tensor) -> torch.Tensor:
        return values.chunk(2, dim=index % 2)[half]

    quarter = ROWS // 4
    held = [whole(i)[rank * quarter : (rank + 1) * quarter].clone() for i in range(NUM_TENSORS)] if rank < 4 else []
    got = [slice_of(i, torch.zeros(shape)).clone() for i in range(NUM_TENSORS)] if rank >= 4 else []

    def group_end() -> None:
        for work in under_way:
            work.wait()
        under_way.clear()

    def move() -> None:
        for index in range(NUM_TENSORS):
            module.xferdtensor_python_impl(
                PeerTensor(held[index], shape) if held else None,
                PeerMesh(TRAINERS),
                [Shard(0)],
                PeerTensor(got[index], shape) if got else None,
                PeerMesh(RECEIVERS),
                [Replicate(), Shard(index % 2)],
                group,
                types.SimpleNamespace(cuda_stream=0),
            )

    seconds = []
    with without_gpus(group_end):
        for _ in range(asked.repeats + 1):
            dist.barrier()
            start_s = time.perf_counter()
            move()
            dist.barrier()
            seconds.append(time.perf_counter() - start_s)
    for index, values in enumerate(got):
        assert torch.equal(values, slice_of(index, whole(index))), index
    dist.destroy_process_group()
    return seconds[1:]
