"""Wiring: the NICs and fast links of one refit's ranks, as the baselines ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_rl_reshard.topology import Topology


@dataclass(frozen=True)
class Wiring:
    """Where the ranks of both sides sit. `members` maps a domain to its ranks, ascending; `nic_of` a rank to its NIC.

    Rates are those reached, `wire_efficiency` of nominal, but for `nominal_network_rate`.
    """

    topology: Topology
    trainers: tuple[int, ...]
    engines: tuple[int, ...]
    domain_of: Mapping[int, int]
    nic_of: Mapping[int, int]
    members: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, topology: Topology, trainers: Iterable[int], engines: Iterable[int]) -> Wiring:
        """The wiring of the ranks of both sides. A rank of both counts for each."""
        sources, targets = tuple(sorted(trainers)), tuple(sorted(engines))
        ranks = sorted({*sources, *targets})
        domain_of = topology.domains_with(ranks)
        members: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            members[domain_of[rank]].append(rank)
        return cls(
            topology,
            sources,
            targets,
            domain_of,
            topology.nics_with(ranks),
            {domain: tuple(found) for domain, found in sorted(members.items())},
        )

    @property
    def fast_rate(self) -> float:
        """Bytes per second of one rank's fast link, one way, as reached."""
        return self.topology.fast_bytes_per_s * self.topology.wire_efficiency

    def nics(self, ranks: Iterable[int]) -> int:
        """Distinct NICs of `ranks`."""
        return len({self.nic_of[rank] for rank in ranks})

    def nominal_network_rate(self, ranks: Iterable[int]) -> float:
        """Nominal bytes per second, one way, of all NICs of `ranks` together."""
        return self.nics(ranks) * self.topology.network_bytes_per_s

    def network_rate(self, ranks: Iterable[int]) -> float:
        """The same as reached."""
        return self.nominal_network_rate(ranks) * self.topology.wire_efficiency

    def domains(self, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Domain -> those of `ranks` in it, in order of domains."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            found[self.domain_of[rank]].append(rank)
        return {domain: tuple(found[domain]) for domain in sorted(found)}

    def busiest_nic(self, loads: Mapping[int, float]) -> tuple[float, int]:
        """(seconds, lowest rank on it) of the NIC with the most bytes; `loads` is by rank."""
        nics: defaultdict[int, float] = defaultdict(float)
        for rank, nbytes in loads.items():
            nics[self.nic_of[rank]] += nbytes
        most, nic = max(((nbytes, -nic) for nic, nbytes in nics.items()), default=(0.0, 0))
        return most / (self.topology.network_bytes_per_s * self.topology.wire_efficiency), -nic
