"""The `topology:` section of a refit spec: a named machine, or domains and link rates given one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nemo_rl_reshard.cli.spec_fields import Fields, is_whole, nearest
from nemo_rl_reshard.errors import FaultList
from nemo_rl_reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Preset:
    """Ranks per domain, and 10^9 bytes per second of one rank's links, one way."""

    domain_size: int
    network_gb_per_s: float
    fast_gb_per_s: float


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "dgx-h100": Preset(domain_size=8, network_gb_per_s=50, fast_gb_per_s=450),
        "dgx-h200": Preset(domain_size=8, network_gb_per_s=50, fast_gb_per_s=450),
        "gb200-nvl72": Preset(domain_size=72, network_gb_per_s=50, fast_gb_per_s=900),
        "gb300-nvl72": Preset(domain_size=72, network_gb_per_s=100, fast_gb_per_s=900),
    }
)
"""Nominal vendor figures: one ConnectX-7 (400 Gb/s) or, on GB300, ConnectX-8 (800 Gb/s) per GPU; NVLink 4 or 5."""

_KEYS = (
    "preset",
    "domains",
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
    of its size; explicit domains and rates, given beside it, take the place of its own.
    """
    if plain is None:
        return Topology()
    if not isinstance(plain, dict):
        faults.add(f"topology: must be a mapping with a preset or domains; got {plain!r}")
        return Topology()
    fields = Fields(plain, "topology", faults, _KEYS)
    preset = None
    if "preset" in fields:
        preset = PRESETS.get(str(plain["preset"]))
        if preset is None:
            fields.fault(f"unknown preset {plain['preset']!r}; {nearest(str(plain['preset']), PRESETS)}", "preset")
    domains: tuple[tuple[int, ...], ...] = ()
    if "domains" in fields:
        domains = _read_domains(fields)
    elif preset is not None:
        domains = _group(sides, preset.domain_size)
    nominal = Topology()
    network = preset.network_gb_per_s if preset else nominal.network_bytes_per_s / 1e9
    fast = preset.fast_gb_per_s if preset else nominal.fast_bytes_per_s / 1e9
    efficiency = fields.positive("wire_efficiency", nominal.wire_efficiency)
    if efficiency > 1:
        fields.fault(
            f"{efficiency} is more than 1; it is the share of the nominal rate that is reached", "wire_efficiency"
        )
    return Topology(
        domains=domains,
        network_bytes_per_s=fields.positive("network_gb_per_s", network) * 1e9,
        fast_bytes_per_s=fields.positive("fast_gb_per_s", fast) * 1e9,
        network_latency_s=fields.positive("network_latency_s", nominal.network_latency_s),
        fast_latency_s=fields.positive("fast_latency_s", nominal.fast_latency_s),
        memory_bytes_per_s=fields.positive("memory_gb_per_s", nominal.memory_bytes_per_s / 1e9) * 1e9,
        wire_efficiency=efficiency,
    )


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


def _group(sides: Sequence[Sequence[int]], size: int) -> tuple[tuple[int, ...], ...]:
    """Each side's ranks in ascending order, `size` to a domain; a rank of both sides stays where the first put it."""
    placed: set[int] = set()
    domains = []
    for ranks in sides:
        fresh = [rank for rank in sorted(set(ranks)) if rank not in placed]
        placed.update(fresh)
        domains += [tuple(fresh[start : start + size]) for start in range(0, len(fresh), size)]
    return tuple(domains)
