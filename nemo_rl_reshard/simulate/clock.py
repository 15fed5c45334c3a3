"""Simulation of a plan: its steps on the event clock, and what the time is spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.plan import Placed, Plan
from nemo_rl_reshard.plan.step_loads import step_loads
from nemo_rl_reshard.simulate.baselines.gather_broadcast import measure
from nemo_rl_reshard.simulate.recurrence import Clock, Work, run_clock
from nemo_rl_reshard.simulate.simulation import PHASES, Simulation
from nemo_rl_reshard.simulate.timeline import Series, Timeline, spread
from nemo_rl_reshard.topology import Topology


def simulate_plan(
    plan: Plan, source: Catalog, target: Catalog, topology: Topology, *, overhead_s: float = 0.0
) -> Simulation:
    """One refit by `plan`, on warm buffers, with links at `wire_efficiency` of nominal.

    Leftovers that the plan places run beside the bulk; their phase is what they add to it. Those that it does not
    place are gathered and broadcast after the bulk, at the same efficiency. `overhead_s` is a fixed cost before the
    first byte: none by default.
    """
    left = {leftover.tensor for leftover in plan.leftovers}
    beside = {row.tensor for row in plan.placed if row.tensor in left}
    clock = run_clock(step_loads(plan), topology)
    bulk = clock
    if beside:
        bulk = run_clock(step_loads(replace(plan, placed=_without(plan, left))), topology)
        if bulk.end_s > clock.end_s:
            bulk = clock
    after_s = _afterwards_s([name for name in left if name not in beside], source, target, topology)
    phases = dict.fromkeys(PHASES, 0.0)
    phases.update(_phases(bulk))
    phases["leftover"] = clock.end_s - bulk.end_s + after_s
    phases["overhead"] = overhead_s
    seconds = overhead_s + clock.end_s + after_s
    return Simulation(
        seconds=seconds,
        phases=phases,
        bottleneck="leftovers after the bulk" if after_s > clock.end_s else _bottleneck(clock),
        timeline=_timeline(clock, plan, seconds, overhead_s),
    )


def _without(plan: Plan, names: set[str]) -> tuple[Placed, ...]:
    return tuple(row for row in plan.placed if row.tensor not in names)


def _afterwards_s(names: Sequence[str], source: Catalog, target: Catalog, topology: Topology) -> float:
    """Seconds to gather and broadcast the tensors `names` when everything else is done."""
    if not names:
        return 0.0
    load = measure(names, source, target, topology)
    gather_s = max(load.gather_network_s / topology.wire_efficiency, load.gather_fast_s)
    broadcast_s = max(load.broadcast_network_s / topology.wire_efficiency, load.broadcast_fast_s)
    return gather_s + broadcast_s + load.load_s


def _phases(clock: Clock) -> dict[str, float]:
    """The time until the first byte leaves, until the NICs fall silent, then the fast links, then the rest."""
    pack_s = clock.first_wire_s
    network_end_s = max(clock.network_send.end_s, clock.network_receive.end_s, pack_s)
    wires_end_s = max(clock.fast_send.end_s, clock.fast_receive.end_s, network_end_s)
    return {
        "pack": pack_s,
        "network": network_end_s - pack_s,
        "fast": wires_end_s - network_end_s,
        "install": clock.end_s - wires_end_s,
    }


def _bottleneck(clock: Clock) -> str:
    """The resource that is busy longest."""
    ranks, nics = clock.seconds.ranks, clock.seconds.nics
    resources = {
        "network send": (clock.network_send, nics),
        "network receive": (clock.network_receive, nics),
        "fast send": (clock.fast_send, ranks),
        "fast receive": (clock.fast_receive, ranks),
        "pack": (clock.pack, ranks),
        "install": (clock.install, ranks),
    }
    found = {name: (*work.busiest, owners) for name, (work, owners) in resources.items()}
    name = max(found, key=lambda key: found[key][0])
    busy_s, position, owners = found[name]
    return f"{name} of rank {owners[position]}" if busy_s > 0 else "nothing to move"


def _timeline(clock: Clock, plan: Plan, seconds: float, shift_s: float) -> Timeline:
    """How busy each side's links and memory are. A NIC is on the side of its lowest rank."""
    sides = (("trainers", frozenset(plan.sources)), ("inference", frozenset(plan.targets)))
    kinds = (
        ("network send", clock.network_send, clock.seconds.nics),
        ("network receive", clock.network_receive, clock.seconds.nics),
        ("fast", clock.fast_receive, clock.seconds.ranks),
        ("pack", clock.pack, clock.seconds.ranks),
        ("install", clock.install, clock.seconds.ranks),
    )
    series = []
    for link, work, owners in kinds:
        for group, members in sides:
            of_group = np.array([owner in members for owner in owners], dtype=bool)
            if of_group.any() and work.busy[:, of_group].any():
                series.append(Series(link, group, _busy(work, of_group, seconds, shift_s)))
    num_bins = len(series[0].busy) if series else 1
    return Timeline(seconds / num_bins, tuple(series))


def _busy(work: Work, of_group: NDArray[np.bool_], seconds: float, shift_s: float) -> NDArray[np.float64]:
    """Busy fraction by bin, each step's work spread over the time in which anyone of the group does it."""
    busy = work.busy[:, of_group]
    active = busy > 0
    used = active.any(axis=1)
    start = np.where(active, work.start[:, of_group], np.inf).min(axis=1)[used]
    stop = np.where(active, work.stop[:, of_group], 0.0).max(axis=1)[used]
    return spread(start + shift_s, stop + shift_s, busy.sum(axis=1)[used] / busy.shape[1], seconds)
