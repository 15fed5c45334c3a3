"""Named machines: how many ranks share fast links, and the nominal rates of their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from nemo_rl_reshard.errors import LayoutError
from nemo_rl_reshard.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class Machine:
    """Ranks that a refit uses of a domain, how many it has, and bytes per second of one rank's links, one way.

    `domain_size` None: one domain holds all ranks of both sides. `device_bytes` is the memory of one rank's device.
    """

    domain_size: int | None
    largest_domain: int | None
    network_bytes_per_s: float
    fast_bytes_per_s: float
    memory_bytes_per_s: float
    device_bytes: int


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "dgx-h100": Machine(8, 8, 50e9, 450e9, 3.35e12, 80 * 10**9),
        "dgx-h200": Machine(8, 8, 50e9, 450e9, 4.8e12, 141 * 10**9),
        "gb200-nvl72": Machine(64, 72, 50e9, 900e9, 8e12, 186 * 10**9),
        "gb300-nvl72": Machine(64, 72, 100e9, 900e9, 8e12, 279 * 10**9),
        "one-host": Machine(None, None, 50e9, 450e9, 3.35e12, 80 * 10**9),
    }
)
"""One 400 Gb/s NIC per rank (800 Gb/s on GB300), NVLink 4 on Hopper, NVLink 5 on Blackwell, HBM rates.

Jobs on NVL72 commonly take 16 of a rack's 18 trays, 64 GPUs, so that parallel sizes stay powers of two. `one-host` has
the links of an eight-GPU Hopper host.
"""


def from_preset(name: str, sides: Sequence[Sequence[int]], domain_size: int | None = None) -> Topology:
    """The topology of machine `name`: the ranks of each side, in rank order, fill domains of its size.

    `domain_size` takes the place of the machine's own, up to what its fast links join. A rank on both sides counts for
    the first one. Raises LayoutError for an unknown name, or a size that the machine does not have.
    """
    machine = MACHINES.get(name)
    if machine is None:
        raise LayoutError(f"unknown topology preset {name!r}; known are {', '.join(MACHINES)}")
    if domain_size is not None and machine.largest_domain is not None and domain_size > machine.largest_domain:
        raise LayoutError(f"a domain of {name} has {machine.largest_domain} ranks; {domain_size} are too many")
    size = machine.domain_size if domain_size is None else domain_size
    return Topology(
        domains=in_rank_order([[rank for side in sides for rank in side]] if size is None else sides, size),
        network_bytes_per_s=machine.network_bytes_per_s,
        fast_bytes_per_s=machine.fast_bytes_per_s,
        memory_bytes_per_s=machine.memory_bytes_per_s,
    )


def in_rank_order(sides: Sequence[Sequence[int]], size: int | None) -> tuple[tuple[int, ...], ...]:
    """Domains of `size` ranks, filled by each side's ranks in ascending order; None: one domain per side.

    A rank on both sides counts for the first one. Raises LayoutError for a size below 1.
    """
    if size is not None and size < 1:
        raise LayoutError(f"a domain of {size} ranks; give 1 or more")
    domains: list[tuple[int, ...]] = []
    seen: set[int] = set()
    for side in sides:
        ranks = sorted(set(side) - seen)
        seen.update(ranks)
        width = size or max(len(ranks), 1)
        domains.extend(tuple(ranks[start : start + width]) for start in range(0, len(ranks), width))
    return tuple(domains)
