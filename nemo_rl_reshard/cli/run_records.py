"""RunRecord: one training run read back: what its refits took, step by step and phase by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

PHASES = ("declare", "pack", "network", "exchange", "leftover", "install", "verify")
SECONDS = "refit/seconds"
LOOP_SECONDS = "timing/train/prepare_for_generation/transfer_and_update_weights"
MEASURES = {
    SECONDS: "the refit as this package's driver saw it",
    LOOP_SECONDS: "NeMo RL's timer around the transfer",
    "timing/train/weight_sync": "NeMo RL's timer around a refit of its asynchronous loop",
}
"""What seconds of a refit a log may hold, the most exact first. Runs are compared by one that all of them have."""


@dataclass(frozen=True)
class RunRecord:
    """The steps of one run. A step may hold no refit: its log has no seconds for it, or says null for one left out.

    `measure` is the key of MEASURES that the run is judged by; `note` what a reader of its figures must know.
    """

    path: Path
    backend: str
    steps: tuple[Mapping[str, Any], ...]
    measure: str = SECONDS
    note: str = ""

    @property
    def refits(self) -> list[Mapping[str, Any]]:
        """Steps that had a refit, in order."""
        return [step for step in self.steps if step.get(self.measure) is not None]

    @property
    def stale(self) -> list[Mapping[str, Any]]:
        """Steps whose refit was left out on purpose."""
        return [step for step in self.steps if SECONDS in step and step[SECONDS] is None]

    @property
    def measures(self) -> list[str]:
        """The keys of MEASURES that the run has values for."""
        return [key for key in MEASURES if any(step.get(key) is not None for step in self.steps)]

    @property
    def has_phases(self) -> bool:
        """Whether the seconds of each phase are known; NeMo RL's own refits are not split."""
        return any(f"{SECONDS}_{phase}" in step for step in self.refits for phase in PHASES)

    def series(self, key: str) -> list[float]:
        """One value per refit; a phase that was not recorded counts as zero."""
        return [float(step.get(key) or 0.0) for step in self.refits]

    def summary(self) -> dict[str, Any]:
        """The figures that runs are compared by, in JSON types; null where the run's log does not have them."""
        seconds = sorted(self.series(self.measure))
        rewards = [float(step["reward/mean"]) for step in self.steps if "reward/mean" in step]
        ends = min(5, len(rewards))
        return {
            "run": str(self.path),
            "backend": self.backend,
            "measure": self.measure,
            "steps": len(self.steps),
            "refits": len(seconds),
            "refit_seconds": {"median": median(seconds), "min": seconds[0], "max": seconds[-1]},
            "phases": {phase: median(self.series(f"{SECONDS}_{phase}")) for phase in PHASES}
            if self.has_phases
            else None,
            "bytes_received_sum": self._bytes("refit/bytes_received_sum"),
            "bytes_received_max": self._bytes("refit/bytes_received_max"),
            "direct_share": self._median("refit/direct_share"),
            "reward": {"first": sum(rewards[:ends]) / ends, "last": sum(rewards[-ends:]) / ends} if ends else None,
            "logprob_gap": self._spread("logprob_gap/mean_abs"),
            "stale_gap": median(float(step["logprob_gap/mean_abs"]) for step in self.stale) if self.stale else None,
            "token_mult_prob_error": self._spread("train/token_mult_prob_error"),
        }

    def _known(self, key: str) -> list[float]:
        return [float(step[key]) for step in self.refits if step.get(key) is not None]

    def _median(self, key: str) -> float | None:
        values = self._known(key)
        return median(values) if values else None

    def _bytes(self, key: str) -> int | None:
        middle = self._median(key)
        return None if middle is None else int(middle)

    def _spread(self, key: str) -> dict[str, float] | None:
        values = self._known(key)
        return {"mean": median(values), "worst": max(values)} if values else None
