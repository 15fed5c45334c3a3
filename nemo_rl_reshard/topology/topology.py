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
    """`domains` partition the ranks; ranks of one domain are joined by fast links. A rank in none is its own domain.

    All rates are nominal and one way; sending and receiving do not share them. `network_bytes_per_s` is that of one
    NIC, which `ranks_per_nic` ranks of a domain share: when all of them are busy each has that part of it, a rank
    whose neighbours are idle has the whole. `fast_bytes_per_s` and `memory_bytes_per_s` are one rank's own.
    """

    domains: tuple[tuple[int, ...], ...] = ()
    network_bytes_per_s: float = 50e9
    fast_bytes_per_s: float = 450e9
    network_latency_s: float = 10e-6
    fast_latency_s: float = 5e-6
    memory_bytes_per_s: float = 2e12
    wire_efficiency: float = 0.885
    ranks_per_nic: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_nic < 1:
            raise LayoutError(f"topology: {self.ranks_per_nic} ranks share a NIC; give 1 or more")
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

    def nics_with(self, ranks: Iterable[int]) -> dict[int, int]:
        """Rank -> the lowest rank that shares its NIC, which stands for the NIC; for the ranks of `domains_with`.

        In rank order, every `ranks_per_nic` ranks of a domain share one; the last NIC of a domain may have fewer.
        """
        members: dict[int, list[int]] = {}
        for rank, domain in self.domains_with(ranks).items():
            members.setdefault(domain, []).append(rank)
        return {
            rank: ordered[position - position % self.ranks_per_nic]
            for ordered in (sorted(domain) for domain in members.values())
            for position, rank in enumerate(ordered)
        }
