"""What a refit took: one rank's report, and the report of the whole refit made from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from nemo_rl_reshard.topology import Link


class Phase(StrEnum):
    """Where a rank's time goes. A rank works on one phase at a time, so they add up to its refit and its set-up."""

    DECLARE = "declare"
    PACK = "pack"
    NETWORK = "network"
    EXCHANGE = "exchange"
    LEFTOVER = "leftover"
    INSTALL = "install"
    VERIFY = "verify"


def _no_seconds() -> dict[str, float]:
    return {str(phase): 0.0 for phase in Phase}


def _no_bytes() -> dict[str, int]:
    return {str(link): 0 for link in Link}


@dataclass
class RankReport:
    """One rank's refit. Seconds by phase; bytes by link, leftovers apart.

    `declare` counts agreeing, and the declaring and connecting before this refit, which `seconds` leaves out; `pack`
    packing, casting, unpacking and local copies; `network` and `exchange` waiting for messages between and inside
    domains. `peak_extra_bytes` is the most memory that the refit held beside the weights.
    """

    rank: int
    version: int
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=_no_seconds)
    bytes_sent: dict[str, int] = field(default_factory=_no_bytes)
    bytes_received: dict[str, int] = field(default_factory=_no_bytes)
    leftover_bytes_sent: int = 0
    leftover_bytes_received: int = 0
    peak_extra_bytes: int = 0
    num_messages: int = 0
    num_zero_copy: int = 0
    num_verified: int = 0

    @contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """Add the time spent inside to `phase`."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.phases[phase] += time.perf_counter() - start_s

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Inverse of `from_plain`."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RankReport:
        """Read what `to_plain` wrote."""
        return cls(**plain)


@dataclass(frozen=True)
class RefitReport:
    """One refit of all ranks. Times are those of the slowest rank, `bytes_received` that of every rank."""

    version: int
    backend: str
    seconds: float
    phases: Mapping[str, float]
    bytes_received_max: int
    bytes_received_sum: int
    direct_share: float
    fraction_of_floor: float
    peak_extra_bytes: int
    ranks: tuple[RankReport, ...]

    @classmethod
    def of(
        cls,
        reports: Sequence[Mapping[str, Any]],
        *,
        backend: str,
        seconds: float | None = None,
        floor_s: float = 0.0,
    ) -> RefitReport:
        """Join plain rank reports of one version.

        `seconds` is the driver's own measure of the whole, the slowest rank's if None. `floor_s` is the plan's
        `floor_seconds`, for links of nominal speed. Raises ValueError for no report, or several versions.
        """
        ranks = tuple(sorted((RankReport.from_plain(report) for report in reports), key=lambda report: report.rank))
        versions = {report.version for report in ranks}
        if len(versions) != 1:
            raise ValueError(f"the reports of one refit have one version, not {sorted(versions)}")
        received = [sum(report.bytes_received.values()) + report.leftover_bytes_received for report in ranks]
        leftover = sum(report.leftover_bytes_received for report in ranks)
        total_s = max(report.seconds for report in ranks) if seconds is None else seconds
        return cls(
            version=versions.pop(),
            backend=backend,
            seconds=total_s,
            phases={phase: max(report.phases[phase] for report in ranks) for phase in map(str, Phase)},
            bytes_received_max=max(received),
            bytes_received_sum=sum(received),
            direct_share=1.0 - leftover / sum(received) if sum(received) else 1.0,
            fraction_of_floor=floor_s / total_s if total_s else 0.0,
            peak_extra_bytes=max(report.peak_extra_bytes for report in ranks),
            ranks=ranks,
        )

    def metrics(self) -> dict[str, float | int | str]:
        """The `refit/*` keys of a training step's metrics."""
        return {
            "refit/backend": self.backend,
            "refit/version": self.version,
            "refit/seconds": self.seconds,
            **{f"refit/seconds_{phase}": seconds for phase, seconds in self.phases.items()},
            "refit/bytes_received_max": self.bytes_received_max,
            "refit/bytes_received_sum": self.bytes_received_sum,
            "refit/direct_share": self.direct_share,
            "refit/fraction_of_floor": self.fraction_of_floor,
            "refit/peak_extra_bytes": self.peak_extra_bytes,
        }
