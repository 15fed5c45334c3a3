"""A communicator whose broadcast and sum go over gloo; every call has finished when it returns."""

from __future__ import annotations

import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, ReduceOp

from nccl.core.utils import TIMEOUT, UniqueId


class Communicator:
    """Buffers are torch tensors on the CPU, sent and received in place."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group = group

    @classmethod
    def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> Communicator:
        """Join; returns when all `nranks` have."""
        return cls(ProcessGroupGloo(unique_id.connect(), rank, nranks, TIMEOUT))

    def broadcast(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, root: int, stream: int) -> None:
        """`recvbuf` of every rank becomes `sendbuf` of `root`; NeMo RL gives one tensor as both."""
        assert sendbuf is recvbuf
        options = BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([recvbuf], options).wait()

    def allreduce(self, sendbuf: torch.Tensor, recvbuf: torch.Tensor, op: str, stream: int) -> None:
        """`recvbuf` of every rank becomes the sum of all; NeMo RL gives one tensor as both."""
        assert sendbuf is recvbuf
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM
        self._group.allreduce([recvbuf], options).wait()
