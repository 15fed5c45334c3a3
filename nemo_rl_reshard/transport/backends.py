"""The torch process groups a transport can be built on: how to build one, wait for its work, and break it off.

A group is built directly on a store. `init_process_group`, `new_group` and the functions of `torch.distributed` are
never used: trainers and engines have default groups of other sizes in the same process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nemo_rl_reshard.errors import TransportError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.nccl_backend import NcclBackend

MAX_TAG = (1 << 31) - 1
"""Reserved: no message carries it, so a receive that expects it can never complete."""


class Backend(Protocol):
    """One kind of process group. Its groups and works are torch's own objects. `in_rounds`: see `Transport`."""

    in_rounds: bool

    def build(self, store: Any, index: int, num_members: int, timeout_s: float) -> Any:
        """Meet the other members on `store`; blocks until all are connected, at most `timeout_s` if that can be."""

    def start_together(self, group: Any, starts: Sequence[Callable[[], Any]]) -> Any:
        """Call all `starts`, each of which starts a send or a receive of `group`; the work that stands for them all.

        Used only where messages go in rounds.
        """

    def wait(self, work: Any, deadline: Deadline, called_off: threading.Event) -> None:
        """Block until `work` is complete. Raises TimeoutError if the deadline passes, RuntimeError if it failed.

        `called_off` is set before `break_off` is called, for waits that `break_off` alone does not wake.
        """

    def break_off(self, group: Any) -> None:
        """Make every wait on `group` raise, in all threads, and stop all writing into buffers. Ruins the group."""

    def leave(self, group: Any) -> None:
        """Give back what a healthy `group` holds. Waits for no other member."""


class GlooBackend:
    """CPU tensors over TCP. All groups of a transport share one device: its listener is bound to `host` only.

    The data connections carry no token: a group's addresses are handed out by the rendezvous alone, and `host` must be
    an address of a network that only the job can reach. A message longer than the buffer posted for it ends the
    receiving process inside gloo, which is why ranks agree on a plan's digest before they move a byte.
    """

    in_rounds = False

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

    def start_together(self, group: Any, starts: Sequence[Callable[[], Any]]) -> Any:
        """Nothing needs it, as `in_rounds` says: every message advances on its own. Raises NotImplementedError."""
        raise NotImplementedError("gloo does not go in rounds; start its messages one by one")

    def wait(self, work: Any, deadline: Deadline, called_off: threading.Event) -> None:  # noqa: ARG002
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

    def leave(self, group: Any) -> None:
        """Dropping the group closes its connections."""


def goes_in_rounds(name: str) -> bool:
    """Whether ranks over the backend called `name` start their messages in rounds; see `Transport`."""
    kinds: dict[str, type[Backend]] = {"gloo": GlooBackend, "nccl": NcclBackend}
    return name in kinds and kinds[name].in_rounds


def make_backend(name: str, host: str, device: torch.device) -> Backend:
    """The backend called `name`: "gloo" or "nccl". Raises TransportError if there is none, or it cannot work here."""
    if name == "gloo":
        return GlooBackend(host)
    if name == "nccl":
        return NcclBackend(device)
    raise TransportError(f"unknown transport backend {name!r}; known are gloo and nccl")
