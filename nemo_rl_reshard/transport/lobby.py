"""Lobby: the few connections that have not yet proven the token, so that a flood of strangers fills no machine."""

from __future__ import annotations

import threading
import time

from nemo_rl_reshard.transport.wire import Wire


class Lobby:
    """Holds at most `room` connections. Each may stay `patience_s` undisturbed, longer if nobody needs its place.

    A rank proves itself in two round trips, so strangers are shown out long before a rank would be; meanwhile ranks
    that come wait in the listener's queue.
    """

    def __init__(self, room: int, patience_s: float) -> None:
        if room < 1:
            raise ValueError(f"a lobby needs room for one connection at least, not {room}")
        self._room = room
        self._patience_s = patience_s
        self._entered_s: dict[Wire, float] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def enter(self, wire: Wire) -> bool:
        """Take `wire` in, waiting for room and at last closing the connection that came first; False once closed."""
        with self._changed:
            while len(self._entered_s) >= self._room and not self._is_closed:
                first, entered_s = next(iter(self._entered_s.items()))
                left_s = entered_s + self._patience_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                else:
                    del self._entered_s[first]
                    first.close()
            if not self._is_closed:
                self._entered_s[wire] = time.monotonic()
            return not self._is_closed

    def leave(self, wire: Wire) -> bool:
        """Give the place of `wire` back; False if it had lost it."""
        with self._changed:
            self._changed.notify()
            return self._entered_s.pop(wire, None) is not None

    def close(self) -> None:
        """Wake whoever waits to enter, and let nobody in any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
