"""Deadline: one moment on the monotonic clock that every wait of a piece of work shares."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from nemo_rl_reshard.errors import TransportTimeoutError


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A moment on this process's monotonic clock. Never travels: send seconds, and make a new deadline on arrival.

    `at_s` is `time.monotonic()` seconds; `budget_s` the seconds it was made with, kept for messages.
    """

    at_s: float
    budget_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment `seconds` from now. Raises ValueError unless `seconds` is positive and can be waited for."""
        if not 0 < seconds <= threading.TIMEOUT_MAX:
            raise ValueError(f"a deadline needs a positive, finite number of seconds, not {seconds}")
        return cls(time.monotonic() + seconds, seconds)

    def remaining_s(self) -> float:
        """Seconds left; 0.0 once it has passed."""
        return max(0.0, self.at_s - time.monotonic())

    def remaining(self) -> timedelta:
        """Time left as torch takes it: never less than a millisecond, since 0 means "for ever" there."""
        return timedelta(seconds=max(0.001, self.remaining_s()))

    def check(self, what: str) -> None:
        """Raise TransportTimeoutError saying that `what` took too long, if the moment has passed."""
        if time.monotonic() >= self.at_s:
            raise TransportTimeoutError(f"{what} passed its deadline of {self.budget_s:g} s")
