"""Read `metrics.jsonl`, which a run of the CPU loop leaves: one object per training step, every fault named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from nemo_rl_reshard.cli.run_records import PHASES, SECONDS, RunRecord
from nemo_rl_reshard.errors import FaultList

NAME = "metrics.jsonl"
_NEEDED = ("step", "refit/backend", SECONDS, "reward/mean", "logprob_gap/mean_abs", "refit/bytes_received_sum")
_ALWAYS = ("reward/mean", "logprob_gap/mean_abs")
_PER_REFIT = (SECONDS, "refit/bytes_received_sum", "refit/bytes_received_max", "refit/direct_share")
_NUMBERS = (*_ALWAYS, *_PER_REFIT, *(f"{SECONDS}_{phase}" for phase in PHASES))


def read_metrics(folder: Path, faults: FaultList) -> RunRecord | None:
    """The run in `folder`, or None after adding to `faults` every line and key that is missing or malformed."""
    before = len(faults)
    steps = _read_steps(folder / NAME, faults)
    if len(faults) > before:
        return None
    if all(step[SECONDS] is None for step in steps):
        faults.add(f"{folder}: {NAME} has no step with a refit")
        return None
    return RunRecord(folder, str(steps[0]["refit/backend"]), tuple(steps))


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
        skipped = SECONDS in step and step[SECONDS] is None
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
