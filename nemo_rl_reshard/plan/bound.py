"""The floor: bytes and seconds that no schedule can beat, given who holds, who needs and how fast links are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import volume
from nemo_rl_reshard.plan.kinds import Kind
from nemo_rl_reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Bound:
    """`unique_bytes`: union of all needs. `network_bytes`: what must enter domains. `bottleneck` sets `seconds`."""

    unique_bytes: int
    network_bytes: int
    seconds: float
    bottleneck: str


def bound_of(kinds: Iterable[Kind], topology: Topology, domain_of: Mapping[int, int]) -> Bound:
    """The floor of a refit of these tensors, at nominal rates, without pack, install or latency.

    Its seconds are the largest of: for each target domain, what must enter it over the rates of its NICs; for each NIC,
    what only one rank at it holds and another domain needs over its rate; for each rank, what it needs and does not
    hold over the rates of its NIC and its fast links.
    """
    unique = 0
    entering: Counter[int] = Counter()
    only_here: Counter[int] = Counter()
    wanting: Counter[int] = Counter()
    for kind in kinds:
        distinct = [region for _, regions in kind.target.held for region in regions]
        unique += kind.item_size * kind.num_tensors * volume(distinct)
        enter, only, want = _by_role(kind)
        for crew, count in kind.casts():
            for role, nbytes in enter.items():
                entering[domain_of[crew[role]]] += nbytes * count
            for role, nbytes in only.items():
                only_here[crew[role]] += nbytes * count
            for role, nbytes in want.items():
                wanting[crew[role]] += nbytes * count
    nic_of = topology.nics_with(domain_of)
    num_nics = Counter(domain_of[rank] for rank in set(nic_of.values()))
    only_at: Counter[int] = Counter()
    for rank, nbytes in only_here.items():
        only_at[nic_of[rank]] += nbytes
    network, fast = topology.network_bytes_per_s, topology.fast_bytes_per_s
    limits = [
        (nbytes / (num_nics[domain] * network), f"inbound of domain {domain}") for domain, nbytes in entering.items()
    ]
    copies = "only copies at the NIC of rank" if topology.ranks_per_nic > 1 else "only copy on rank"
    limits += [(nbytes / network, f"{copies} {rank}") for rank, nbytes in only_at.items()]
    limits += [(nbytes / (network + fast), f"inbound of rank {rank}") for rank, nbytes in wanting.items()]
    seconds, bottleneck = max(limits, key=lambda limit: (limit[0], limit[1]), default=(0.0, "nothing to move"))
    return Bound(unique, sum(entering.values()), seconds, bottleneck)


def _by_role(kind: Kind) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """Bytes of one tensor: that enter a role's domain, that only a role holds, that a role needs and lacks."""
    enter: Counter[int] = Counter()
    leaving: defaultdict[int, set[Region]] = defaultdict(set)
    want: Counter[int] = Counter()
    for demand in kind.demands:
        nbytes = demand.region.numel * kind.item_size
        if not demand.near:
            enter[demand.needers[0]] += nbytes
            if len(demand.holders) == 1:
                leaving[demand.holders[0]].add(demand.region)
        for role in demand.needers:
            if role not in demand.near:
                want[role] += nbytes
    only = Counter({role: kind.item_size * volume(list(regions)) for role, regions in leaving.items()})
    return enter, only, want
