"""Where a refit's times go: NeMo RL's timer, its `refit/*` scalars, and one line in the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl_reshard.orchestration.plan_book import Planned
from nemo_rl_reshard.runtime.report import RefitReport

LABEL = "prepare_for_generation/transfer_and_update_weights"
"""The label under which every refit of NeMo RL is timed."""

LOG = logging.getLogger("nemo_rl_reshard")


@contextmanager
def standard_label(timer: Any) -> Iterator[None]:
    """Time what is inside under LABEL; `timer` is NeMo RL's, or None."""
    if timer is None:
        yield
        return
    with timer.time(LABEL):
        yield


def record_phases(timer: Any, report: RefitReport) -> None:
    """One sub-label per phase, `<LABEL>/reshard_<phase>`: the slowest rank's seconds."""
    if timer is not None:
        for phase, seconds in report.phases.items():
            timer.record(f"{LABEL}/reshard_{phase}", seconds)


def scalars(report: RefitReport) -> dict[str, float]:
    """What `sync_weights` returns: the report's numbers without the prefix `refit/`, which NeMo RL puts back."""
    return {
        name.removeprefix("refit/"): float(value)
        for name, value in report.metrics().items()
        if not isinstance(value, str)
    }


def summary_line(report: RefitReport) -> str:
    """The refit in one line."""
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in report.phases.items() if seconds >= 0.0005)
    return (
        f"refit {report.version} by {report.backend}: {report.seconds:.3f} s ({phases}), "
        f"{report.bytes_received_sum / 1e6:.4g} MB received, {report.direct_share:.1%} direct, "
        f"{report.fraction_of_floor:.2f} of the floor"
    )


def show_log() -> None:
    """See to it that what this package logs for users is seen, where the process has not configured logging."""
    if LOG.level == logging.NOTSET:
        LOG.setLevel(logging.INFO)
    if not LOG.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        LOG.addHandler(handler)


def plan_summary(planned: Planned, backend: str) -> str:
    """The plan in a few lines: tensors, direct share, leftovers with their reasons, the floor."""
    totals, plan = planned.summary["totals"], planned.plan
    share = totals["direct_bytes"] / totals["unique_bytes"] if totals["unique_bytes"] else 1.0
    reasons: dict[str, list[str]] = {}
    for leftover in plan.leftovers:
        reasons.setdefault(leftover.reason, []).append(leftover.tensor)
    lines = [
        f"refit plan for {backend}: {len(plan.specs)} tensors, {totals['unique_bytes'] / 1e6:.4g} MB, "
        f"{share:.1%} direct, {len(plan.leftovers)} leftovers, {totals['num_skipped']} skipped, "
        f"floor {planned.floor_s * 1e3:.3f} ms"
    ]
    lines += [f"  leftover ({reason}): {len(names)}, such as {names[0]}" for reason, names in reasons.items()]
    return "\n".join(lines)
