"""Statistics of a plan: the JSON that `nemo-rl-reshard plan` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.bound import Bound, bound_of
from nemo_rl_reshard.plan.kinds import kinds_of
from nemo_rl_reshard.plan.optimum import least_maximum
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.traffic import Traffic, conventional_traffic, placed_traffic
from nemo_rl_reshard.simulate.clock import simulate_plan
from nemo_rl_reshard.simulate.simulation import Simulation
from nemo_rl_reshard.topology import Link, Topology

SCHEMA = 1
_PHASES = ("pack", "network", "fast", "leftover", "install")


def statistics(plan: Plan, source: Catalog, target: Catalog, topology: Topology) -> dict[str, Any]:
    """Schema, digest, totals, per_rank, balance, predicted and leftovers of a plan made from these declarations.

    JSON types only and in a fixed order, so equal input gives equal bytes. Leftovers that are not placed are counted by
    the rule of `conventional_traffic`; `pack_bytes` is what a rank sends to other ranks. `predicted` is the simulated
    refit.
    """
    domain_of = topology.domains_with(plan.ranks)
    leftover_names = [leftover.tensor for leftover in plan.leftovers]
    left = set(leftover_names)
    direct_names = [name for name in plan.specs if name not in left]
    direct_kinds = kinds_of(direct_names, source, target, domain_of)
    leftover_kinds = kinds_of(leftover_names, source, target, domain_of)
    bound = bound_of((*direct_kinds, *leftover_kinds), topology, domain_of)
    direct_bytes = bound_of(direct_kinds, topology, domain_of).unique_bytes
    direct = placed_traffic(plan, leftovers=False)
    leftover = placed_traffic(plan, leftovers=True)
    if plan.broadcast:
        broadcast = [each.tensor for each in plan.broadcast]
        leftover = leftover + conventional_traffic(broadcast, source, target, domain_of)
    everything = conventional_traffic(direct_names + leftover_names, source, target, domain_of)
    both = direct + leftover
    return {
        "schema": SCHEMA,
        "digest": plan.digest,
        "totals": {
            "unique_bytes": bound.unique_bytes,
            "direct_bytes": direct_bytes,
            "leftover_bytes": bound.unique_bytes - direct_bytes,
            "network_bytes": both.total(Link.NETWORK),
            "network_bytes_floor": bound.network_bytes,
            "fast_bytes": both.total(Link.FAST),
            "local_bytes": both.total(Link.LOCAL),
            "gather_broadcast_bytes": sum(everything.total(link) for link in Link),
            "num_transfers": _num_transfers(plan),
            "num_steps": plan.num_steps,
            "num_skipped": len(plan.skipped),
        },
        "per_rank": _per_rank(plan.ranks, both),
        "balance": _balance(plan, both, direct, source, target, least_maximum(direct_kinds)),
        "predicted": _predicted(simulate_plan(plan, source, target, topology), bound),
        "leftovers": [
            {"tensor": leftover.tensor, "bytes": leftover.nbytes, "reason": leftover.reason}
            for leftover in plan.leftovers
        ],
    }


def transfers_to_plain(plan: Plan) -> list[dict[str, Any]]:
    """Every transfer of a direct tensor as JSON types, by step, then in the order in which tensors start."""
    left = {leftover.tensor for leftover in plan.leftovers}
    return [
        {
            "tensor": transfer.tensor,
            "offset": list(transfer.region.offset),
            "extent": list(transfer.region.extent),
            "src": transfer.src,
            "dst": transfer.dst,
            "link": str(transfer.link),
            "step": transfer.step,
        }
        for transfer in sorted(plan.transfers(), key=lambda transfer: transfer.step)
        if transfer.tensor not in left
    ]


def _num_transfers(plan: Plan) -> int:
    return sum(len(plan.templates[row.template].variants[row.variant]) for row in plan.placed)


def _per_rank(ranks: Iterable[int], traffic: Traffic) -> list[dict[str, int]]:
    return [
        {
            "rank": rank,
            "network_send": traffic.sent[Link.NETWORK][rank],
            "network_recv": traffic.received[Link.NETWORK][rank],
            "fast_send": traffic.sent[Link.FAST][rank],
            "fast_recv": traffic.received[Link.FAST][rank],
            "pack_bytes": traffic.sent[Link.NETWORK][rank] + traffic.sent[Link.FAST][rank],
        }
        for rank in ranks
    ]


def _balance(
    plan: Plan, both: Traffic, direct: Traffic, source: Catalog, target: Catalog, least: float
) -> dict[str, float]:
    """Send over trainers that hold anything, receive over ranks that need anything; the optimum over direct transfers.

    Every rank of the target needs leftovers, since its loader gets them whole.
    """
    holders = _ranks_with_elements(source)
    needers = plan.targets if plan.leftovers else _ranks_with_elements(target)
    busiest = max(direct.sent[Link.NETWORK].values(), default=0)
    return {
        "max_network_send_over_mean": _over_mean(both.sent[Link.NETWORK], holders),
        "max_network_recv_over_mean": _over_mean(both.received[Link.NETWORK], needers),
        "max_network_send_over_optimum": _rounded(busiest / least) if least else 1.0,
    }


def _ranks_with_elements(catalog: Catalog) -> list[int]:
    layouts = {id(layout): layout for layout in catalog.layouts.values()}
    return sorted({rank for layout in layouts.values() for rank in layout.ranks})


def _over_mean(loads: Counter[int], ranks: Iterable[int]) -> float:
    """Largest over mean of the given ranks; 1 when they move nothing."""
    values = [loads[rank] for rank in ranks]
    total = sum(values)
    return _rounded(max(values) * len(values) / total) if total else 1.0


def _predicted(simulation: Simulation, bound: Bound) -> dict[str, Any]:
    return {
        "seconds": _rounded(simulation.seconds),
        "phases": {phase: _rounded(simulation.phases[phase]) for phase in _PHASES},
        "floor_seconds": _rounded(bound.seconds),
        "floor_bottleneck": bound.bottleneck,
        "bottleneck": simulation.bottleneck,
    }


def _rounded(value: float) -> float:
    """Twelve significant digits: enough for nanoseconds, and the same text on every machine."""
    return float(f"{value:.12g}")
