"""StartedWork: an operation of a process group that is under way, and what is asked for before it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_rl_reshard.transport.deadline import Deadline

Start = Callable[[], Any]
"""Starts one operation of a group, and returns torch's work for it."""


class StartedWork:
    """An operation under way. Holds its buffers for as long as the group may touch them.

    `work` is torch's; None if there is nothing to wait for. Operations that started together share it.
    """

    def __init__(
        self,
        finish: Callable[[StartedWork, Deadline], None],
        what: str,
        work: Any,
        buffers: tuple[Tensor, ...],
    ) -> None:
        self._finish = finish
        self.what = what
        self.work = work
        self.buffers = buffers

    def wait(self, deadline: Deadline) -> None:
        """See `Pending.wait`."""
        if self.work is not None:
            self._finish(self, deadline)
            self.work = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A message from `pair[0]` to `pair[1]` that is to start with others."""

    started: StartedWork
    pair: tuple[int, int]
    start: Start
