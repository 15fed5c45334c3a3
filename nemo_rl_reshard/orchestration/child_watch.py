"""ChildWatch: remembers which child process of this one died first, so that a failure can be blamed on it."""

from __future__ import annotations

import multiprocessing
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

_STATUS_WITHIN_S = 1.0


class ChildWatch:
    """Watches, for good, the children that live when it is made. Workers of an engine's own executor are children."""

    def __init__(self) -> None:
        self._children = {child.sentinel: child for child in multiprocessing.active_children()}
        self._deaths: dict[int, int | None] = {}
        self._recorded = threading.Event()
        if self._children:
            threading.Thread(target=self._watch, name="reshard-child-watch", daemon=True).start()

    def first_deaths(self, within_s: float) -> dict[int, int | None]:
        """Process id -> exit code (negative: the signal) of the child or children that died first; empty if none did.

        The code is None where whoever collected it did not keep it. Waits up to `within_s` seconds for a death to be
        noticed. Later deaths are left out: an executor that lost one worker stops the others.
        """
        if self._children:
            self._recorded.wait(within_s)
        return dict(self._deaths) if self._recorded.is_set() else {}

    def _watch(self) -> None:
        for sentinel in wait(list(self._children)):
            if isinstance(sentinel, int):
                child = self._children[sentinel]
                if child.pid is not None:
                    self._deaths[child.pid] = _exit_code(child)
        self._recorded.set()


def _exit_code(child: BaseProcess) -> int | None:
    """Of a child whose sentinel fired, which is before its status can be collected.

    The executor watches the same children: if its thread collects the status, ours is told "no such child" and finds
    the code a moment later, once that thread has written it down. So joining is not enough.
    """
    give_up = time.monotonic() + _STATUS_WITHIN_S
    while child.exitcode is None and time.monotonic() < give_up:
        time.sleep(0.005)
    return child.exitcode
