"""Traffic: bytes that each rank sends and receives over each kind of link, direct transfers and leftovers apart."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import cut
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.topology import Link


@dataclass(slots=True)
class Traffic:
    """Bytes by link and rank. A local copy counts as sent and received by its rank."""

    sent: dict[Link, Counter[int]] = field(default_factory=lambda: {link: Counter() for link in Link})
    received: dict[Link, Counter[int]] = field(default_factory=lambda: {link: Counter() for link in Link})

    def add(self, link: Link, src: int, dst: int, nbytes: int) -> None:
        """Count one move."""
        self.sent[link][src] += nbytes
        self.received[link][dst] += nbytes

    def total(self, link: Link) -> int:
        """Bytes over one kind of link, all ranks."""
        return self.received[link].total()

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            {link: self.sent[link] + other.sent[link] for link in Link},
            {link: self.received[link] + other.received[link] for link in Link},
        )


def placed_traffic(plan: Plan, *, leftovers: bool) -> Traffic:
    """What the transfers of a plan move: of its leftovers that are placed, or of its direct tensors."""
    traffic = Traffic()
    left = {leftover.tensor for leftover in plan.leftovers}
    uses = Counter((row.template, row.variant, row.crew) for row in plan.placed if (row.tensor in left) == leftovers)
    for (index, variant, place), count in uses.items():
        template, crew = plan.templates[index], plan.crews[place]
        sizes = [template.nbytes_of(piece) * count for piece in range(len(template.pieces))]
        for piece, src, dst, link, _ in template.variants[variant]:
            traffic.add(link, crew[src], crew[dst], sizes[piece])
    return traffic


def conventional_traffic(
    names: Iterable[str], source: Catalog, target: Catalog, domain_of: Mapping[int, int]
) -> Traffic:
    """What gathering and broadcasting the tensors `names` moves, in the wire dtype.

    The rule: every trainer gathers each whole tensor, receiving what it lacks, over a fast link where a trainer of its
    domain holds it, from the lowest-ranked holder. Then the lowest trainer broadcasts to every target rank: once over
    the network to the lowest target rank of each domain without trainers, over fast links to all others. A target
    rank that is a trainer too copies at home.
    """
    traffic = Traffic()
    groups: Counter[tuple[int, tuple[int, ...]]] = Counter()
    layouts: dict[int, TensorLayout] = {}
    for name in names:
        spec, layout = target.specs[name], source.layouts[name]
        layouts[id(layout)] = layout
        # Source padding beyond the target's shape does not travel, so equal layouts may leave different parts.
        groups[id(layout), spec.shape] += spec.item_size
    broadcast = 0
    for (identity, shape), bytes_per_element in groups.items():
        whole = Region.whole(shape)
        _count_gather(layouts[identity], whole, bytes_per_element, source.ranks, domain_of, traffic)
        broadcast += whole.numel * bytes_per_element
    if broadcast and source.ranks:
        _count_broadcast(broadcast, source.ranks, target.ranks, domain_of, traffic)
    return traffic


def _count_gather(
    layout: TensorLayout,
    whole: Region,
    bytes_per_element: int,
    trainers: Sequence[int],
    domain_of: Mapping[int, int],
    traffic: Traffic,
) -> None:
    """Every trainer receives every element it lacks."""
    holders_of: defaultdict[Region, list[int]] = defaultdict(list)
    for rank, regions in layout.held:
        for region in regions:
            inside = region.intersect(whole)
            if inside is not None:
                holders_of[inside].append(rank)
    distinct = sorted(holders_of)
    for cell in cut(distinct):
        nbytes = cell.region.numel * bytes_per_element
        holders = {rank for index in cell.inside for rank in holders_of[distinct[index]]}
        lowest_in: dict[int, int] = {}
        for rank in sorted(holders):
            lowest_in.setdefault(domain_of[rank], rank)
        lowest = min(holders)
        for rank in trainers:
            if rank not in holders:
                near = lowest_in.get(domain_of[rank])
                link = Link.NETWORK if near is None else Link.FAST
                traffic.add(link, lowest if near is None else near, rank, nbytes)


def _count_broadcast(
    nbytes: int, trainers: Sequence[int], receivers: Sequence[int], domain_of: Mapping[int, int], traffic: Traffic
) -> None:
    """Every receiver gets `nbytes` whole bytes."""
    root = min(trainers)
    has_all: dict[int, int] = {}
    for rank in sorted(trainers):
        has_all.setdefault(domain_of[rank], rank)
    for rank in sorted(receivers):
        if rank in trainers:
            traffic.add(Link.LOCAL, rank, rank, nbytes)
        elif domain_of[rank] in has_all:
            traffic.add(Link.FAST, has_all[domain_of[rank]], rank, nbytes)
        else:
            traffic.add(Link.NETWORK, root, rank, nbytes)
            has_all[domain_of[rank]] = rank
