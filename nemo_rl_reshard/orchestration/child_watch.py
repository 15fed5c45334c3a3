"""ChildWatch: remembers which child process of this one died first, so that a failure can be blamed on it."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.connection import wait


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

        Waits up to `within_s` seconds for a death to be noticed. Later deaths are left out: an executor that lost one
        worker stops the others.
        """
        if self._children:
            self._recorded.wait(within_s)
        return dict(self._deaths) if self._recorded.is_set() else {}

    def _watch(self) -> None:
        for sentinel in wait(list(self._children)):
            if isinstance(sentinel, int):
                child = self._children[sentinel]
                # The sentinel fires before the exit status can be collected.
                child.join(timeout=1.0)
                if child.pid is not None:
                    self._deaths[child.pid] = child.exitcode
        self._recorded.set()
