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
    """

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Describe `error` and where it was raised."""
        frames = traceback.extract_tb(error.__traceback__)
        place = f" [{frames[-1].name}, line {frames[-1].lineno} of {frames[-1].filename}]" if frames else ""
        return cls(type(error).__name__, f"{error}{place}")

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
    """`value` of an operation on `rank` of the refit world, or the `fault` that kept it from having one.

    `seconds` is how long the rank took, by its own clock. `written` says of an inference rank that its engine may no
    longer hold the weights it held before: this refit, or one that failed, has begun there. Who cannot know says so.
    """

    rank: int
    value: Any = None
    fault: Fault | None = None
    seconds: float = 0.0
    written: bool = False

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Inverse of `from_plain`."""
        plain: dict[str, Any] = {"rank": self.rank, "seconds": self.seconds, "written": self.written}
        if self.fault is None:
            return {**plain, "value": self.value}
        return {**plain, "fault": [self.fault.kind, self.fault.message]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Outcome:
        """Read what `to_plain` wrote."""
        fault = Fault(*plain["fault"]) if "fault" in plain else None
        return cls(int(plain["rank"]), plain.get("value"), fault, float(plain["seconds"]), bool(plain["written"]))
