"""The torch process groups a transport can be built on: how to build one, wait for its work, and break it off.

A group is built directly on a store. `init_process_group`, `new_group` and the functions of `torch.distributed` are
never used: trainers and engines have default groups of other sizes in the same process.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nemo_rl_reshard.errors import TransportError
from nemo_rl_reshard.transport.deadline import Deadline

MAX_TAG = (1 << 31) - 1
"""Reserved: no message carries it, so a receive that expects it can never complete."""


class Backend(Protocol):
    """One kind of process group. Its groups and works are torch's own objects."""

    def build(self, store: Any, index: int, num_members: int, timeout_s: float) -> Any:
        """Meet the other members on `store`; blocks until all are connected, at most `timeout_s`."""

    def wait(self, work: Any, deadline: Deadline) -> None:
        """Block until `work` is complete. Raises TimeoutError if the deadline passes, RuntimeError if it failed."""

    def break_off(self, group: Any) -> None:
        """Make every wait on `group` raise, in all threads, and stop all writing into buffers. Ruins the group."""


class GlooBackend:
    """CPU tensors over TCP. All groups of a transport share one device: its listener is bound to `host` only.

    The data connections carry no token: a group's addresses are handed out by the rendezvous alone, and `host` must be
    an address of a network that only the job can reach. A message longer than the buffer posted for it ends the
    receiving process inside gloo, which is why ranks agree on a plan's digest before they move a byte.
    """

    def __init__(self, host: str) -> None:
        try:
            self._device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        except RuntimeError as fault:
            raise TransportError(f"gloo cannot listen on {host!r}: {fault}") from fault

    def build(self, store: Any, index: int, num_members: int, timeout_s: float) -> Any:
        """See `Backend.build`."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupGloo(store, index, num_members, options)

    def wait(self, work: Any, deadline: Deadline) -> None:
        """See `Backend.wait`. A wait that expires closes every connection of the group, so it is never sliced."""
        try:
            work.wait(deadline.remaining())
        except RuntimeError as fault:
            # gloo counts whole milliseconds, so its clock may be a little ahead of the deadline's.
            if deadline.remaining_s() < 0.002 or "timed out" in str(fault).lower():
                raise TimeoutError(str(fault)) from fault
            raise

    def break_off(self, group: Any) -> None:
        """See `Backend.break_off`.

        gloo has no abort that wakes a blocked wait; but a receive that expires closes every connection of its group
        and wakes all. A peer whose connection is already broken fails at once and closes no other, so ask each in turn.
        """
        never = torch.empty(1, dtype=torch.uint8)
        for peer in range(group.size()):
            if peer != group.rank():
                with suppress(RuntimeError):
                    group.recv([never], peer, MAX_TAG).wait(timedelta(milliseconds=1))


class NcclBackend:
    """CUDA tensors over NCCL; the device current at construction is the one used."""

    def __init__(self) -> None:
        missing = [
            *([] if torch.cuda.is_available() else ["a CUDA device"]),
            *([] if hasattr(dist, "ProcessGroupNCCL") else ["a torch that is built with NCCL"]),
        ]
        if missing:
            raise TransportError(f"the nccl transport needs {' and '.join(missing)}; use gloo on CPU")

    def build(self, store: Any, index: int, num_members: int, timeout_s: float) -> Any:
        """See `Backend.build`. NCCL connects a pair at its first use."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return dist.ProcessGroupNCCL(store, index, num_members, options)

    def wait(self, work: Any, deadline: Deadline) -> None:
        """See `Backend.wait`. NCCL's own wait only orders streams, so the host asks until the work is complete."""
        while not work.is_completed():
            if deadline.remaining_s() == 0:
                raise TimeoutError("the work is not complete")
            time.sleep(0.0001)
        work.wait()

    def break_off(self, group: Any) -> None:
        """See `Backend.break_off`."""
        group.abort()


def make_backend(name: str, host: str) -> Backend:
    """The backend called `name`: "gloo" or "nccl". Raises TransportError if there is none, or it cannot work here."""
    if name == "gloo":
        return GlooBackend(host)
    if name == "nccl":
        return NcclBackend()
    raise TransportError(f"unknown transport backend {name!r}; known are gloo and nccl")
