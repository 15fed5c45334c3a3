"""Which of the faults of a failed stage came first, and which ranks only waited for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.orchestration.outcome import DIED, SILENT, Fault, Outcome

LATE_S = 2.0
"""A rank that waits hears within milliseconds that the refit was called off; one that needs this much longer was not
waiting but busy with something else."""


def refit_error(stage: str, outcomes: Sequence[Outcome], names: Mapping[int, str]) -> RefitError:
    """One error for every fault in `outcomes`; `names` says which rank is whose.

    First causes are, in this order: ranks that died or raised an error of their own; failing those, ranks whose
    transport broke; failing those, ranks that gave no answer although they were called off; failing those, ranks
    that answered LATE_S after the first that failed. Everything else is listed as waiting.
    """
    failed = {outcome.rank: outcome for outcome in outcomes if outcome.fault is not None}
    first = _first(failed)
    causes = {names[rank]: str(failed[rank].fault) for rank in first}
    waiting = {names[rank]: str(outcome.fault) for rank, outcome in failed.items() if rank not in first}
    lines = [f"{stage} failed on {len(failed)} of {len(names)} ranks"]
    lines += [f"first cause: {name}: {text}" for name, text in causes.items()]
    if not causes:
        lines.append("no rank reported a cause of its own; every one of them waited in vain")
    lines += [f"only waited: {name}: {text}" for name, text in waiting.items()]
    return RefitError("\n  - ".join(lines), causes, waiting)


def _first(failed: Mapping[int, Outcome]) -> list[int]:
    """The ranks at fault, ascending; see `refit_error`."""
    faults = {rank: outcome.fault for rank, outcome in failed.items() if outcome.fault is not None}
    earliest_s = min((outcome.seconds for outcome in failed.values()), default=0.0)
    for at_fault in (
        [rank for rank, fault in faults.items() if _is_own(fault)],
        [rank for rank, fault in faults.items() if fault.is_of_transport and not fault.is_wait],
        [rank for rank, fault in faults.items() if fault.kind == SILENT],
        [rank for rank, outcome in failed.items() if outcome.seconds > earliest_s + LATE_S],
    ):
        if at_fault:
            return sorted(at_fault)
    return []


def _is_own(fault: Fault) -> bool:
    """Whether this fault can only have begun on its own rank."""
    return fault.kind == DIED or not (fault.kind == SILENT or fault.is_of_transport)
