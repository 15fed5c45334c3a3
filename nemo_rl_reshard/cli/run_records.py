"""RunRecord: one run folder read back: what its refits took, step by step and phase by phase."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from nemo_rl_reshard.errors import ConfigError, FaultList

PHASES = ("declare", "pack", "network", "exchange", "leftover", "install", "verify")
_NEEDED = ("step", "refit/backend", "refit/seconds", "reward/mean", "logprob_gap/mean_abs", "refit/bytes_received_sum")

_ALWAYS = ("reward/mean", "logprob_gap/mean_abs")
_PER_REFIT = ("refit/seconds", "refit/bytes_received_sum", "refit/bytes_received_max", "refit/direct_share")
_NUMBERS = (*_ALWAYS, *_PER_REFIT, *(f"refit/seconds_{phase}" for phase in PHASES))


@dataclass(frozen=True)
class RunRecord:
    """The steps of one run. `refits` are the steps that had a refit; the others kept older weights on purpose."""

    path: Path
    steps: tuple[Mapping[str, Any], ...]

    @property
    def refits(self) -> list[Mapping[str, Any]]:
        """Steps that had a refit, in order."""
        return [step for step in self.steps if step["refit/seconds"] is not None]

    @property
    def stale(self) -> list[Mapping[str, Any]]:
        """Steps whose refit was left out."""
        return [step for step in self.steps if step["refit/seconds"] is None]

    @property
    def backend(self) -> str:
        """The refit backend of the run."""
        return str(self.steps[0]["refit/backend"])

    def series(self, key: str) -> list[float]:
        """One value per refit; a phase that was not recorded counts as zero."""
        return [float(step.get(key) or 0.0) for step in self.refits]

    def summary(self) -> dict[str, Any]:
        """The figures that runs are compared by, in JSON types: seconds, bytes, reward and log-probability gap."""
        seconds = sorted(self.series("refit/seconds"))
        gaps = self.series("logprob_gap/mean_abs")
        rewards = [float(step["reward/mean"]) for step in self.steps]
        ends = min(5, len(rewards))
        return {
            "run": str(self.path),
            "backend": self.backend,
            "steps": len(self.steps),
            "refits": len(seconds),
            "refit_seconds": {"median": median(seconds), "min": seconds[0], "max": seconds[-1]},
            "phases": {phase: median(self.series(f"refit/seconds_{phase}")) for phase in PHASES},
            "bytes_received_sum": int(median(self.series("refit/bytes_received_sum"))),
            "bytes_received_max": int(median(self.series("refit/bytes_received_max"))),
            "direct_share": median(self.series("refit/direct_share")),
            "reward": {"first": sum(rewards[:ends]) / ends, "last": sum(rewards[-ends:]) / ends},
            "logprob_gap": {"mean": median(gaps), "worst": max(gaps)},
            "stale_gap": median(float(step["logprob_gap/mean_abs"]) for step in self.stale) if self.stale else None,
        }


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run folders. Raises one ConfigError listing every folder, line and key that is missing or malformed."""
    faults = FaultList("reading runs", ConfigError)
    records = []
    for path in paths:
        before = len(faults)
        steps = _read_steps(path / "metrics.jsonl", faults)
        if len(faults) > before:
            continue
        record = RunRecord(path, tuple(steps))
        if not record.steps or not record.refits:
            faults.add(f"{path}: metrics.jsonl has no step with a refit")
        records.append(record)
    faults.raise_if_any()
    return records


def _read_steps(path: Path, faults: FaultList) -> list[Mapping[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as fault:
        faults.add(f"{path}: cannot be read: {fault.strerror}")
        return []
    except UnicodeDecodeError as fault:
        faults.add(f"{path}: is not UTF-8 text: {fault}")
        return []
    steps: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
        except (ValueError, RecursionError) as fault:
            faults.add(f"{path}, line {number}: is not JSON: {fault}")
            continue
        if not isinstance(step, dict):
            faults.add(f"{path}, line {number}: is not an object")
            continue
        skipped = "refit/seconds" in step and step["refit/seconds"] is None
        needed = [key for key in _NEEDED if not (skipped and key == "refit/bytes_received_sum")]
        missing = [key for key in needed if key not in step]
        if missing:
            faults.add(f"{path}, line {number}: lacks {', '.join(missing)}")
        wrong = [key for key in _NUMBERS if step.get(key) is not None and not _is_number(step[key])]
        wrong += [key for key in _ALWAYS if key in step and step[key] is None]
        if wrong:
            values = ", ".join(f"{key} {step[key]!r}" for key in wrong)
            faults.add(f"{path}, line {number}: no finite numbers: {values}")
        steps.append(step)
    return steps


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
