"""The `topology:` section of a refit spec: a named machine, or domains and link rates given one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_rl_reshard.cli.spec_fields import Fields, is_whole, nearest
from nemo_rl_reshard.errors import FaultList
from nemo_rl_reshard.topology import MACHINES, Topology, from_preset, in_rank_order

_KEYS = (
    "preset",
    "domain_size",
    "domains",
    "ranks_per_nic",
    "network_gb_per_s",
    "fast_gb_per_s",
    "network_latency_s",
    "fast_latency_s",
    "memory_gb_per_s",
    "wire_efficiency",
)


def read_topology(plain: Any, sides: Sequence[Sequence[int]], faults: FaultList) -> Topology:
    """The topology of a spec whose sides have the given ranks. Faults are noted; defaults stand in for what is wrong.

    Without a section every rank is a domain of its own. A preset groups each side's ranks, in rank order, into domains
    of its size, or of `domain_size`; explicit domains and rates, given beside it, take the place of its own.
    """
    if plain is None:
        return Topology()
    if not isinstance(plain, dict):
        faults.add(f"topology: must be a mapping with a preset or domains; got {plain!r}")
        return Topology()
    fields = Fields(plain, "topology", faults, _KEYS)
    nominal = _read_nominal(fields, sides, _read_count(fields, "domain_size"))
    if "domains" in fields and "domain_size" in fields:
        fields.fault("give domains, or the size that each side's ranks fill, not both", "domain_size")
    domains = _read_domains(fields) if "domains" in fields else nominal.domains
    efficiency = fields.positive("wire_efficiency", nominal.wire_efficiency)
    if efficiency > 1:
        fields.fault(
            f"{efficiency} is more than 1; it is the share of the nominal rate that is reached", "wire_efficiency"
        )
    return Topology(
        domains=domains,
        network_bytes_per_s=fields.positive("network_gb_per_s", nominal.network_bytes_per_s / 1e9) * 1e9,
        fast_bytes_per_s=fields.positive("fast_gb_per_s", nominal.fast_bytes_per_s / 1e9) * 1e9,
        network_latency_s=fields.positive("network_latency_s", nominal.network_latency_s),
        fast_latency_s=fields.positive("fast_latency_s", nominal.fast_latency_s),
        memory_bytes_per_s=fields.positive("memory_gb_per_s", nominal.memory_bytes_per_s / 1e9) * 1e9,
        wire_efficiency=efficiency,
        ranks_per_nic=_read_count(fields, "ranks_per_nic") or nominal.ranks_per_nic,
    )


def _read_nominal(fields: Fields, sides: Sequence[Sequence[int]], domain_size: int | None) -> Topology:
    """The preset's topology, or the default one with domains of `domain_size`."""
    if "preset" not in fields:
        return Topology() if domain_size is None else Topology(in_rank_order(sides, domain_size))
    name = str(fields.plain["preset"])
    if name not in MACHINES:
        fields.fault(f"unknown preset {fields.plain['preset']!r}; {nearest(name, MACHINES)}", "preset")
        return Topology()
    largest = MACHINES[name].largest_domain
    if domain_size is not None and largest is not None and domain_size > largest:
        fields.fault(f"{domain_size} is more than the {largest} ranks that a domain of {name} has", "domain_size")
        domain_size = None
    return from_preset(name, sides, domain_size)


def _read_count(fields: Fields, key: str) -> int | None:
    """A whole number of at least 1; None when it is absent or (with a fault noted) wrong."""
    value = fields.plain.get(key)
    if key not in fields or (is_whole(value) and value >= 1):
        return value
    fields.fault(f"{value!r} is not a whole number of ranks, 1 or more", key)
    return None


def _read_domains(fields: Fields) -> tuple[tuple[int, ...], ...]:
    listed = fields.plain["domains"]
    if not isinstance(listed, list) or not all(isinstance(domain, list) for domain in listed):
        fields.fault(f"{listed!r} is not a list of lists of ranks", "domains")
        return ()
    place: dict[int, int] = {}
    sound = True
    for index, domain in enumerate(listed):
        for rank in domain:
            if not is_whole(rank) or rank < 0:
                fields.fault(f"{rank!r} is not a rank; ranks are non-negative whole numbers", f"domains[{index}]")
                sound = False
            elif rank in place:
                fields.fault(f"rank {rank} is already in domain {place[rank]}", f"domains[{index}]")
                sound = False
            else:
                place[rank] = index
    return tuple(tuple(domain) for domain in listed) if sound else ()
