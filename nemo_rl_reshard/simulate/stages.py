"""Stages: feed-forward tensors by the trainers that hold them, and what resharding each stage asks of the links."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.classify import expert_group
from nemo_rl_reshard.simulate.layout_pairs import LayoutPair, layout_pairs
from nemo_rl_reshard.simulate.volumes import Volumes
from nemo_rl_reshard.simulate.wiring import Wiring


@dataclass(frozen=True)
class StageLoad:
    """What resharding the bulk tensors of one pipeline stage asks of the links, each byte once into every domain.

    `num_pieces` are the shards, by checkpoint name, that the busiest trainer prepares: one for a dense tensor's call,
    one for each of its experts in a call for all experts.
    `sent_s` and `received_s` are seconds of the busiest trainer's and engine's NIC, `fast_s` of the busiest engine's
    fast link. `copied` is bytes that the busiest rank of either side stages; `*_total` those of all ranks together.
    """

    trainers: tuple[int, ...]
    num_calls: int
    num_pieces: int
    sent_s: float
    received_s: float
    fast_s: float
    copied: float
    sent_total: float
    received_total: float
    fast_total: float
    installed_total: float


def call_of(name: str) -> str:
    """The call that moves a tensor: its own, or the one for all experts of a layer's projection."""
    group = expert_group(name)
    if group is None:
        return name
    index, _, projection = name.removeprefix(f"{group}.").partition(".")
    return f"{group}.{projection}" if index.isdigit() else name


def stages_of(names: Iterable[str], source: Catalog) -> tuple[tuple[str, ...], ...]:
    """Tensors `names` by pipeline stage, stages in order of their first tensor.

    Tensors whose calls share a trainer are of one stage.
    """
    calls: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        calls[call_of(name)].append(name)
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            rank = leader[rank]
        return rank

    first_rank: dict[str, int] = {}
    for call, members in calls.items():
        layouts = {id(source.layouts[name]): source.layouts[name] for name in members}
        ranks = [rank for layout in layouts.values() for rank, _ in layout.held]
        first_rank[call] = ranks[0]
        for rank in ranks:
            leader[find(rank)] = find(ranks[0])
    stages: defaultdict[int, list[str]] = defaultdict(list)
    for call, members in calls.items():
        stages[find(first_rank[call])].extend(members)
    return tuple(tuple(members) for members in stages.values())


def measure_stage(
    names: Sequence[str], source: Catalog, target: Catalog, wiring: Wiring, volumes: Volumes
) -> StageLoad:
    """The load of one stage: replicas of a shard share its sending, ranks of a domain share its receiving."""
    sent: Counter[int] = Counter()
    copied: Counter[int] = Counter()
    pieces: Counter[int] = Counter()
    received: Counter[int] = Counter()
    entering_nics: Counter[int] = Counter()
    by_target: defaultdict[tuple[int, tuple[int, ...]], list[LayoutPair]] = defaultdict(list)
    for pair in layout_pairs(names, source, target):
        by_target[id(pair.target), pair.shape].append(pair)
        for rank in pair.source.ranks:
            pieces[rank] += pair.num_tensors
        for region, holders in volumes.holders(pair.source, pair.shape).items():
            nbytes = region.numel * pair.bytes_per_element
            for rank in holders:
                sent[rank] += nbytes / len(holders)  # type: ignore[assignment]
                copied[rank] += nbytes
    source_domains = {wiring.domain_of[rank] for rank in sent}
    entered = installed = 0.0
    fast: Counter[int] = Counter()
    for pairs in by_target.values():
        layout, shape = pairs[0].target, pairs[0].shape
        bytes_per_element = sum(pair.bytes_per_element for pair in pairs)
        held = volumes.of_ranks(layout, shape)
        for rank, elements in held.items():
            received[rank] += elements * bytes_per_element
        needers = wiring.domains(held)
        for domain, regions in volumes.regions_of_domains(layout, shape).items():
            entering = float(volumes.union(regions) * bytes_per_element)
            if domain in source_domains:
                entering -= sum(
                    volumes.common(regions, volumes.regions_of_domains(pair.source, shape).get(domain, frozenset()))
                    * pair.bytes_per_element
                    for pair in pairs
                )
            ranks = needers[domain]
            entered += entering
            for rank in ranks:
                entering_nics[rank] += entering / len(ranks)  # type: ignore[assignment]
                fast[rank] += held[rank] * bytes_per_element - entering / len(ranks)  # type: ignore[assignment]
        installed += sum(held.values()) * bytes_per_element
    on_the_way = sent if entered else Counter[int]()
    return StageLoad(
        trainers=tuple(sorted(sent)),
        num_calls=len({call_of(name) for name in names}),
        num_pieces=max(pieces.values(), default=0),
        sent_s=wiring.busiest_nic(on_the_way)[0],
        received_s=wiring.busiest_nic(entering_nics)[0],
        fast_s=max(fast.values(), default=0.0) / wiring.fast_rate,
        copied=max((*copied.values(), *received.values()), default=0),
        sent_total=sum(on_the_way.values()),
        received_total=entered,
        fast_total=sum(fast.values()),
        installed_total=installed,
    )
