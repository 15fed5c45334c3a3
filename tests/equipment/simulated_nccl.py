"""torch's NCCL groups, simulated: the calls that the transport makes, over the semantics of `nccl_semantics`."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any, ClassVar

import torch
from torch import Tensor

from equipment.nccl_semantics import NcclHub, NcclLikeTransport
from nemo_rl_reshard.transport.nccl_backend import NcclBackend

_hubs: dict[str, NcclHub] = {}


class SimulatedWork:
    """A work whose completion can be asked for; waiting for it only orders streams."""

    def __init__(self, hub: NcclHub, pending: Any) -> None:
        self._hub = hub
        self._kernel = pending.kernel

    def is_completed(self) -> bool:
        with self._hub.changed:
            return bool(self._kernel.done)

    def wait(self) -> bool:
        assert self.is_completed(), "the host would go on before the bytes are there"
        return True


class SimulatedNccl:
    """Stands in for `torch.distributed.ProcessGroupNCCL`: members meet by an id that the first puts into the store."""

    class Options:
        _timeout: Any = None

    made_with: ClassVar[list[str | None]] = []
    """What the environment said of the watchdog when each group was made."""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.made_with.append(os.environ.get("TORCH_NCCL_BLOCKING_WAIT"))
        self._store, self._rank, self._size = store, rank, size
        self._end: NcclLikeTransport | None = None
        self._open: list[tuple[str, Tensor, int]] | None = None
        self.aborted = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None:
        if self._rank == 0:
            name = uuid.uuid4().hex
            _hubs[name] = NcclHub(self._size, notices_deadlock=False)
            self._store.set("id", name)
        self._hub = _hubs[self._store.get("id").decode()]
        self._end = self._hub.transport(self._rank)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _start_coalescing(self) -> None:
        assert self._open is None
        self._open = []

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> None:
        assert self._open is not None, "an unbatched send has a communicator of its own"
        self._open.append(("send", tensors[0], dst))

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> None:
        assert self._open is not None, "an unbatched receive has a communicator of its own"
        self._open.append(("receive", tensors[0], src))

    def _end_coalescing(self) -> SimulatedWork | None:
        opened, self._open = self._open, None
        assert opened is not None
        assert self._end is not None
        if not opened:
            return None
        with self._end.together():
            pending = [getattr(self._end, kind)(buffer, peer) for kind, buffer, peer in opened]
        return SimulatedWork(self._hub, pending[0])

    def _allgather_base(self, output: Tensor, own: Tensor) -> SimulatedWork:
        assert self._end is not None
        return SimulatedWork(self._hub, self._end.all_gather(output, own, tuple(range(self._size))))

    def broadcast(self, tensors: list[Tensor], options: Any) -> SimulatedWork:
        assert self._end is not None
        everyone = tuple(range(self._size))
        return SimulatedWork(self._hub, self._end.broadcast(tensors[0], options.rootRank, everyone))

    def abort(self) -> None:
        self.aborted.set()
        if self._end is not None:
            self._hub.break_off(self._rank)


class BackendWithoutGpu(NcclBackend):
    """The backend as it is, except that it does not look for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
