"""Every error the package raises, and the list that gathers faults so that one error names them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class ReshardError(Exception):
    """Root of every error raised by this package."""


class ConfigError(ReshardError):
    """The `refit:` section or a refit spec is wrong; nothing was started."""


class LayoutError(ReshardError):
    """A layout, region or placement cannot mean what it says."""


class DeclarationError(ReshardError):
    """What a side declares is incomplete, contradictory or does not match the other side."""


class PlanError(ReshardError):
    """No correct plan exists for the two declarations, or a plan failed its own proof."""


class HandshakeError(ReshardError):
    """The ranks of a refit world do not agree. When it is about the coming refit, no byte was moved."""


class StateError(ReshardError):
    """A call came in a state that does not allow it; the message gives the present state."""


class TransportError(ReshardError):
    """Bytes could not be moved."""


class TransportTimeoutError(TransportError):
    """A wait passed its deadline. A rank that only timed out is rarely the first cause."""


class RefitAbortedError(TransportError):
    """Another rank failed and called the refit off. Never the first cause."""


class TargetError(ReshardError):
    """The inference engine cannot take the weights as declared."""


class VerificationError(ReshardError):
    """Weights arrived, and differ from what the trainers hold."""


class RefitError(ReshardError, RuntimeError):
    """One refit failed. Separates first causes from ranks that only waited for them. A RuntimeError, as in NeMo RL.

    `causes` and `waiting` map a rank (or an actor's name) to what it reported. `before_first_write` says that every
    engine is proven to hold the whole weights it held before; whatever is not known counts as written.
    """

    def __init__(
        self, message: str, causes: dict[str, str], waiting: dict[str, str], before_first_write: bool = False
    ) -> None:
        super().__init__(message)
        self.causes = causes
        self.waiting = waiting
        self.before_first_write = before_first_write

    def __reduce__(self) -> tuple[Any, ...]:
        """Survive the way out of an actor: an exception is made anew from the arguments of its class."""
        return type(self), (str(self), self.causes, self.waiting, self.before_first_write), self.__dict__


class FaultList:
    """Gathers the faults of one stage so that one error lists them all, in the order found."""

    def __init__(self, stage: str, error: type[ReshardError]) -> None:
        self._stage = stage
        self._error = error
        self._faults: list[str] = []

    def add(self, fault: str) -> None:
        """Remember one fault: a full sentence that names tensor, rank and fix where they apply."""
        self._faults.append(fault)

    def extend(self, faults: Iterable[str]) -> None:
        """Remember several faults."""
        self._faults.extend(faults)

    def __len__(self) -> int:
        return len(self._faults)

    def raise_if_any(self) -> None:
        """Raise the stage's error with every fault listed, or return if there is none."""
        if not self._faults:
            return
        count = len(self._faults)
        head = f"{self._stage}: {count} fault{'s' if count > 1 else ''}"
        raise self._error("\n  - ".join([head, *self._faults]))
