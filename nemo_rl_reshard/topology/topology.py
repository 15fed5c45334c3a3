"""Topology: which ranks share fast links, and how many bytes per second each kind of link carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_reshard.errors import LayoutError


class Link(StrEnum):
    """How two ranks reach each other."""

    NETWORK = "network"
    FAST = "fast"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Topology:
    """`domains` partition the ranks; ranks of one domain are joined by fast links. Rates are per rank, one way.

    A rank named by no domain is a domain of its own.
    """

    domains: tuple[tuple[int, ...], ...] = ()
    network_bytes_per_s: float = 50e9
    fast_bytes_per_s: float = 450e9
    network_latency_s: float = 10e-6
    fast_latency_s: float = 5e-6
    memory_bytes_per_s: float = 2e12
    wire_efficiency: float = 0.885

    def __post_init__(self) -> None:
        named = [rank for domain in self.domains for rank in domain]
        twice = sorted({rank for rank in named if named.count(rank) > 1}) if len(set(named)) != len(named) else []
        if twice:
            raise LayoutError(f"topology names ranks {twice} in more than one domain")

    def domain_of(self) -> dict[int, int]:
        """Rank -> index of its domain, for the ranks that a domain names."""
        return {rank: index for index, domain in enumerate(self.domains) for rank in domain}

    def domains_with(self, ranks: Iterable[int]) -> dict[int, int]:
        """Like `domain_of`, with each of `ranks` that no domain names in a domain of its own, after the others."""
        found = self.domain_of()
        alone = sorted({rank for rank in ranks if rank not in found})
        return found | {rank: len(self.domains) + position for position, rank in enumerate(alone)}
