"""RefitOrder: what the driver asks of every rank for one refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from nemo_rl_reshard.errors import HandshakeError


class VerifyMode(StrEnum):
    """How much of a refit is compared by digest: nothing, a sample that changes with the seed, everything."""

    OFF = "off"
    SAMPLE = "sample"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class RefitOrder:
    """One refit to `version`. `deadline_s` bounds it on every rank, `seed` picks the sample."""

    version: int
    verify: VerifyMode
    deadline_s: float
    seed: int

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RefitOrder:
        """Read plain values; `verify` defaults to off and `seed` to 0. Raises HandshakeError if malformed."""
        try:
            return cls(
                version=int(plain["version"]),
                verify=VerifyMode(plain.get("verify", VerifyMode.OFF)),
                deadline_s=float(plain["deadline_s"]),
                seed=int(plain.get("seed", 0)),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise HandshakeError(f"malformed refit order: {fault}") from fault

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Inverse of `from_plain`."""
        return {**asdict(self), "verify": str(self.verify)}
