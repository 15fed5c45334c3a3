"""The floor: bytes and seconds that no schedule can beat, given who holds, who needs and how fast links are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import volume
from nemo_rl_reshard.plan.needs import Need
from nemo_rl_reshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Bound:
    """`unique_bytes`: union of all needs. `network_bytes`: what must enter domains. `bottleneck` sets `seconds`."""

    unique_bytes: int
    network_bytes: int
    seconds: float
    bottleneck: str


def bound_of(needs: Iterable[Need], topology: Topology, domain_of: Mapping[int, int]) -> Bound:
    """The floor of a refit with these needs, at nominal rates, without pack, install or latency.

    Its seconds are the largest of: for each target domain, what must enter it over the rates of its NICs; for each NIC,
    what only one rank at it holds and another domain needs over its rate; for each rank, what it needs and does not
    hold over the rates of its NIC and its fast links.
    """
    unique = 0
    entering: Counter[int] = Counter()
    only_here: Counter[int] = Counter()
    wanting: Counter[int] = Counter()
    for need in needs:
        per_element = need.item_size * need.num_tensors
        unique += per_element * volume([region for _, regions in need.target.held for region in regions])
        leaving: defaultdict[int, set[Region]] = defaultdict(set)
        for demand in need.demands:
            nbytes = demand.region.numel * per_element
            if not demand.near:
                entering[demand.domain] += nbytes
                if len(demand.holders) == 1:
                    leaving[demand.holders[0]].add(demand.region)
            for rank in demand.needers:
                if rank not in demand.near:
                    wanting[rank] += nbytes
        for rank, regions in leaving.items():
            only_here[rank] += per_element * volume(list(regions))
    nic_of = topology.nics_with(domain_of)
    num_nics = Counter(domain_of[rank] for rank in set(nic_of.values()))
    only_at: Counter[int] = Counter()
    for rank, nbytes in only_here.items():
        only_at[nic_of[rank]] += nbytes
    network, fast = topology.network_bytes_per_s, topology.fast_bytes_per_s
    limits = [
        (nbytes / (num_nics[domain] * network), f"inbound of domain {domain}") for domain, nbytes in entering.items()
    ]
    only = "only copies at the NIC of rank" if topology.ranks_per_nic > 1 else "only copy on rank"
    limits += [(nbytes / network, f"{only} {rank}") for rank, nbytes in only_at.items()]
    limits += [(nbytes / (network + fast), f"inbound of rank {rank}") for rank, nbytes in wanting.items()]
    seconds, bottleneck = max(limits, key=lambda limit: (limit[0], limit[1]), default=(0.0, "nothing to move"))
    return Bound(unique, sum(entering.values()), seconds, bottleneck)
