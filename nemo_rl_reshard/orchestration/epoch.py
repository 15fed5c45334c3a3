"""Epochs number the attempts to build a refit world, so that ranks know calls that come late or out of order."""

from __future__ import annotations

import time

from nemo_rl_reshard.errors import StateError


def next_epoch(last: int) -> int:
    """An epoch after `last`, and after those of any controller that drove the same actors before this one.

    Milliseconds since 1970, so that a controller made anew need not know what its predecessor had come to.
    """
    return max(last + 1, time.time_ns() // 1_000_000)


class EpochFence:
    """What one rank has seen of its controllers' worlds. Keeps calls of an old world out of a newer one.

    Actors with coroutines run queued calls in any order, and a call that nobody waits for any more may still be
    queued. The fence lives as long as the rank, longer than any session.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._has_left = False

    def declare(self, who: str, epoch: int) -> None:
        """Enter `epoch`. Raises StateError if `who` has seen a later one, or has been told to leave this one."""
        if epoch < self._epoch:
            raise StateError(f"declare: {who} was asked in epoch {epoch}, which is over: it has seen {self._epoch}")
        if epoch == self._epoch and self._has_left:
            raise StateError(f"declare: {who} has left epoch {epoch} for good")
        self._epoch = epoch
        self._has_left = False

    def check(self, who: str, operation: str, epoch: int) -> None:
        """Raise StateError unless `who` declared in `epoch`, in no later one, and has not left it."""
        if self._epoch < 0:
            raise StateError(f"{operation}: {who} has declared nothing yet")
        if epoch != self._epoch:
            raise StateError(f"{operation}: {who} was asked in epoch {epoch} and stands in epoch {self._epoch}")
        if self._has_left:
            raise StateError(f"{operation}: {who} has left epoch {epoch} for good")

    def leave(self, epoch: int) -> bool:
        """Leave `epoch` and all before it; False, and nothing is left, if a later one was seen."""
        if epoch < self._epoch:
            return False
        self._epoch = epoch
        self._has_left = True
        return True
