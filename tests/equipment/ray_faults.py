"""Faults that strike at one exact place: when an actor is asked something, or a rank for one tensor's memory."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Planned:
    """Do `kind` when `tensor` is viewed in a refit: "raise", "stall" (for `seconds`), or "kill".

    Killed is process `pid`, the own one if None. "kill and raise" does both, so that nobody can be called off between
    two faults.
    """

    kind: str
    tensor: str
    seconds: float = 120.0
    pid: int | None = None

    def strike(self) -> None:
        if self.kind in ("kill", "kill and raise"):
            os.kill(self.pid or os.getpid(), signal.SIGKILL)
        if self.kind in ("raise", "kill and raise"):
            raise ValueError(f"planned to fail at {self.tensor}")
        if self.kind == "stall":
            threading.Event().wait(self.seconds)


def with_fault(end: Any, fault: Planned | None, is_refitting: Callable[[], bool]) -> Any:
    """A source or target whose `view` (and a target's `load`) strikes `fault` once in a refit.

    A fault of the tensor "manifest" strikes when that is asked for.
    """
    if fault is None:
        return end
    waiting = [fault]
    manifest, view, load = end.manifest, end.view, getattr(end, "load", None)

    def strike(tensor: str) -> None:
        if waiting and waiting[0].tensor == tensor:
            waiting.pop().strike()

    def faulty_view(tensor: str, region: Any) -> Any:
        if is_refitting():
            strike(tensor)
        return view(tensor, region)

    def faulty_load(named: Any) -> None:
        for tensor, _ in named:
            strike(tensor)
        load(named)

    def faulty_manifest(*arguments: Any) -> Any:
        strike("manifest")
        return manifest(*arguments)

    end.manifest = faulty_manifest
    end.view = faulty_view
    if load is not None:
        end.load = faulty_load
    return end
