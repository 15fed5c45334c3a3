"""Named machines: how many ranks share fast links, and the nominal rates of their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from nemo_rl_reshard.errors import LayoutError
from nemo_rl_reshard.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class Machine:
    """Ranks per domain, and bytes per second of one rank's links, one way, as the vendor states them."""

    domain_size: int
    network_bytes_per_s: float
    fast_bytes_per_s: float
    memory_bytes_per_s: float


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "dgx-h100": Machine(8, 50e9, 450e9, 3.35e12),
        "dgx-h200": Machine(8, 50e9, 450e9, 4.8e12),
        "gb200-nvl72": Machine(72, 50e9, 900e9, 8e12),
        "gb300-nvl72": Machine(72, 100e9, 900e9, 8e12),
    }
)
"""One 400 Gb/s adapter per rank (800 Gb/s on GB300), NVLink 4 on Hopper, NVLink 5 on Blackwell, HBM rates."""


def from_preset(name: str, sides: Sequence[Sequence[int]]) -> Topology:
    """The topology of machine `name`: the ranks of each side, in rank order, fill domains of its size.

    A rank on both sides counts for the first one. Raises LayoutError for an unknown name.
    """
    machine = MACHINES.get(name)
    if machine is None:
        raise LayoutError(f"unknown topology preset {name!r}; known are {', '.join(MACHINES)}")
    domains: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for side in sides:
        ranks = sorted(set(side) - seen)
        seen.update(ranks)
        domains.extend(
            tuple(ranks[start : start + machine.domain_size]) for start in range(0, len(ranks), machine.domain_size)
        )
    return Topology(
        domains=tuple(domains),
        network_bytes_per_s=machine.network_bytes_per_s,
        fast_bytes_per_s=machine.fast_bytes_per_s,
        memory_bytes_per_s=machine.memory_bytes_per_s,
    )
