"""Which of the faults of a failed stage came first, and which ranks only waited for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.orchestration.outcome import DIED, SILENT, Fault, Outcome


def refit_error(stage: str, outcomes: Sequence[Outcome], names: Mapping[int, str]) -> RefitError:
    """One error for every fault in `outcomes`; `names` says which rank is whose.

    First causes are, in this order: ranks that died or raised an error of their own; failing those, ranks whose
    transport broke; failing those, ranks that gave no answer although they were called off; failing those, ranks
    that others say they waited for and that did not themselves wait in vain. Everything else is listed as waiting.
    """
    faults = {outcome.rank: outcome.fault for outcome in outcomes if outcome.fault is not None}
    first = _first(faults)
    causes = {names[rank]: str(faults[rank]) for rank in first}
    waiting = {names[rank]: str(fault) for rank, fault in faults.items() if rank not in first}
    lines = [f"{stage} failed on {len(faults)} of {len(names)} ranks"]
    lines += [f"first cause: {name}: {text}" for name, text in causes.items()]
    if not causes:
        lines.append("no rank reported a cause of its own; every one of them waited in vain")
    lines += [f"only waited: {name}: {text}" for name, text in waiting.items()]
    return RefitError("\n  - ".join(lines), causes, waiting)


def _first(faults: Mapping[int, Fault]) -> set[int]:
    """The ranks at fault; see `refit_error`."""
    own = {rank for rank, fault in faults.items() if _is_own(fault)}
    if own:
        return own
    broken = {rank for rank, fault in faults.items() if fault.is_of_transport and not fault.is_wait}
    if broken:
        return broken
    silent = {rank for rank, fault in faults.items() if fault.kind == SILENT}
    if silent:
        return silent
    timed_out = {rank for rank, fault in faults.items() if fault.kind == "TransportTimeoutError"}
    blamed = {peer for rank in timed_out for peer in faults[rank].waited_for}
    return (blamed - timed_out) & set(faults)


def _is_own(fault: Fault) -> bool:
    """Whether this fault can only have begun on its own rank."""
    return fault.kind == DIED or not (fault.kind == SILENT or fault.is_of_transport)
