"""NcclBackend: process groups over NCCL, whose operations run on streams of a GPU. Written, not yet run on GPUs.

What it relies on is in `docs/adr/0010-nccl-in-rounds.md`, with sources.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_reshard.errors import TransportError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.streams import LONGEST_NAP_S, SHORTEST_NAP_S

_BREAK_OFF_S = 5.0
"""How long a rank waits for NCCL to give its communicators up. Ranks are woken before that, without NCCL's help."""
_UNWATCHED = "TORCH_NCCL_BLOCKING_WAIT"
"""Read by torch when it makes a group."""


class NcclBackend:
    """CUDA tensors over NCCL, all on one device. A group has one communicator and one stream for everything."""

    in_rounds = True

    def __init__(self, device: torch.device) -> None:
        """Raises TransportError if NCCL cannot work here, or `device` is no GPU."""
        missing = [
            *([] if torch.cuda.is_available() else ["a CUDA device"]),
            *([] if hasattr(dist, "ProcessGroupNCCL") else ["a torch that is built with NCCL"]),
        ]
        if missing:
            raise TransportError(f"the nccl transport needs {' and '.join(missing)}; use gloo on CPU")
        if device.type != "cuda":
            raise TransportError(f"the nccl transport moves bytes of a GPU, and this rank's lie on {device}")
        self._device = device

    def build(self, store: Any, index: int, num_members: int, timeout_s: float) -> Any:
        """See `Backend.build`. Not interruptible: NCCL waits for the members on its own."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        with _without_watchdog():
            group = dist.ProcessGroupNCCL(store, index, num_members, options)
        # Now, so that the communicator is there before the first message; torch then uses no other for single ones.
        group.eager_connect_single_device(self._device)
        return group

    def start_together(self, group: Any, starts: Sequence[Callable[[], Any]]) -> Any:
        """See `Backend.start_together`. One NCCL group, and so one kernel."""
        group._start_coalescing()
        try:
            for start in starts:
                start()
        except BaseException:
            with suppress(RuntimeError):  # the first error counts; this only closes what was opened
                group._end_coalescing()
            raise
        return group._end_coalescing()

    def wait(self, work: Any, deadline: Deadline, called_off: threading.Event) -> None:
        """See `Backend.wait`. NCCL's own wait only orders streams, so the host asks until the work is complete."""
        nap_s = SHORTEST_NAP_S
        while not work.is_completed():
            if deadline.remaining_s() == 0:
                raise TimeoutError("the work is not complete")
            if called_off.wait(nap_s):
                break
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
        if called_off.is_set():  # a kernel that was broken off counts as complete, and its bytes did not arrive
            raise RuntimeError("the refit was called off")
        work.wait()  # raises what NCCL found, and orders the current stream after the work

    def break_off(self, group: Any) -> None:
        """See `Backend.break_off`. Waits for NCCL, but not for long."""
        thread = threading.Thread(target=_abort, args=(group,), name="refit-break-off", daemon=True)
        thread.start()
        thread.join(_BREAK_OFF_S)

    def leave(self, group: Any) -> None:
        """See `Backend.leave`. An abort, since it waits for nobody; every rank agreed before that all is done."""
        self.break_off(group)


def _abort(group: Any) -> None:
    with suppress(RuntimeError):  # it is given up in any case
        group.abort()


_environment = threading.Lock()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make groups of which torch does not watch the work.

    Its watchdog ends the whole process a minute after a peer was lost: here the refit fails, and training goes on. A
    setting of the environment is the only way to say so, and torch reads it while it makes the group.
    """
    with _environment:
        before = os.environ.get(_UNWATCHED)  # noqa: TID251
        os.environ[_UNWATCHED] = "1"  # noqa: TID251
        try:
            yield
        finally:
            if before is None:
                del os.environ[_UNWATCHED]  # noqa: TID251
            else:
                os.environ[_UNWATCHED] = before  # noqa: TID251
