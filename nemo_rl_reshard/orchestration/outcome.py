"""Outcome: what one rank answers to one operation, as plain values that survive JSON and need no class to be read."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard import errors

DIED = "died"
SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a rank could not do as asked.

    `kind` is the name of the exception's class, or DIED (the process is gone), or SILENT (no answer by the deadline).
    `waited_for` are the ranks it was waiting for, where the transport knows them.
    """

    kind: str
    message: str
    waited_for: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Describe `error` and where it was raised."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f" [{frames[-1].name}, line {frames[-1].lineno} of {frames[-1].filename}]" if frames else ""
        peers = getattr(error, "peers", ())
        return cls(type(error).__name__, f"{error}{place}", tuple(int(peer) for peer in peers))

    @property
    def is_of_transport(self) -> bool:
        """Bytes did not arrive; why may lie with another rank."""
        return self._is_a(errors.TransportError)

    @property
    def is_wait(self) -> bool:
        """This rank only waited, or was called off: never the first cause while anything else is known."""
        return self._is_a(errors.TransportTimeoutError) or self._is_a(errors.RefitAbortedError)

    def _is_a(self, family: type[errors.ReshardError]) -> bool:
        found = getattr(errors, self.kind, None)
        return isinstance(found, type) and issubclass(found, family)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`value` of an operation on `rank` of the refit world, or the `fault` that kept it from having one."""

    rank: int
    value: Any = None
    fault: Fault | None = None

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Inverse of `from_plain`."""
        if self.fault is None:
            return {"rank": self.rank, "value": self.value}
        fault = self.fault
        plain = {"kind": fault.kind, "message": fault.message, "waited_for": list(fault.waited_for)}
        return {"rank": self.rank, "fault": plain}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Outcome:
        """Read what `to_plain` wrote."""
        if "fault" not in plain:
            return cls(int(plain["rank"]), plain["value"])
        fault = plain["fault"]
        return cls(int(plain["rank"]), None, Fault(fault["kind"], fault["message"], tuple(fault["waited_for"])))
