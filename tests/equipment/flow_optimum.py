"""The best that any schedule without relays could do, from painted elements and a maximum flow of networkx."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import networkx
import numpy as np

from equipment.independent_checker import ITEM_SIZE, Canvas
from equipment.plan_case import Boxes, Held, PlanCase, declared

Loads = Counter[frozenset[int]]  # bytes that any rank of the set may carry


def stretched(case: PlanCase, factor: int) -> PlanCase:
    """The same refit with every dim `factor` times as long: megabytes to plan, and few elements to paint.

    Asserts that every rank's part grows alike, which holds where cuts come out even.
    """
    pairs = tuple(
        replace(
            pair,
            shape=tuple(size * factor for size in pair.shape),
            source=_stretched(pair.source, factor),
            target=_stretched(pair.target, factor),
        )
        for pair in case.tensors
    )
    for small, large in zip(case.tensors, pairs, strict=True):
        for before, after in ((small.source, large.source), (small.target, large.target)):
            cuts, grown = declared(before, small.shape), declared(after, large.shape)
            for rank in case.ranks:
                boxes = [(region.offset, region.extent) for region in cuts.regions_of(rank)]
                assert [(r.offset, r.extent) for r in grown.regions_of(rank)] == [_grown(b, factor) for b in boxes]
    return replace(case, tensors=pairs, bucket_bytes=64 << 20, message_bytes=4 << 20)


def sender_loads(case: PlanCase, factor: int) -> Loads:
    """What must enter domains, by the set of trainers that could send it."""
    loads: Loads = Counter()
    for canvas, weight in _weighed(case, factor):
        for members in _domains(case):
            crossing = _crossing(canvas, members)
            for holders, count in _sets(canvas.holds, crossing).items():
                loads[holders] += count * weight
    return loads


def single_loads(case: PlanCase, factor: int) -> Loads:
    """What must leave its trainers at least once, by the set of those that could send it: all that relays leave over.

    Bytes that two domains need without a trainer of their own are counted once.
    """
    loads: Loads = Counter()
    for canvas, weight in _weighed(case, factor):
        leaving = np.any([_crossing(canvas, members) for members in _domains(case)], axis=0)
        for holders, count in _sets(canvas.holds, leaving).items():
            loads[holders] += count * weight
    return loads


def receiver_loads(case: PlanCase, factor: int) -> dict[tuple[int, ...], Loads]:
    """For each domain that something must enter, that by the set of its ranks that could receive it first."""
    loads: dict[tuple[int, ...], Loads] = {members: Counter() for members in _domains(case)}
    for canvas, weight in _weighed(case, factor):
        for members, found in loads.items():
            crossing = _crossing(canvas, members)
            for needers, count in _sets({rank: canvas.needs[rank] for rank in members}, crossing).items():
                found[needers] += count * weight
    return {members: found for members, found in loads.items() if found}


def least_peak(loads: Mapping[frozenset[int], int]) -> int:
    """The least possible load of the busiest rank, in whole bytes: the smallest capacity through which all flows."""
    total = sum(loads.values())
    ranks = frozenset().union(*loads)
    low, high = -(-total // max(1, len(ranks))), max(total, 0)
    while low < high:
        middle = (low + high) // 2
        if _flow(loads, ranks, middle) == total:
            high = middle
        else:
            low = middle + 1
    return low


def _flow(loads: Mapping[frozenset[int], int], ranks: frozenset[int], capacity: int) -> int:
    graph = networkx.DiGraph()
    for number, (able, nbytes) in enumerate(loads.items()):
        graph.add_edge("all", ("load", number), capacity=nbytes)
        for rank in able:
            graph.add_edge(("load", number), rank)  # no capacity: any amount
    for rank in ranks:
        graph.add_edge(rank, "done", capacity=capacity)
    return int(networkx.maximum_flow_value(graph, "all", "done"))


def _weighed(case: PlanCase, factor: int) -> list[tuple[Canvas, int]]:
    """Canvases of the unstretched tensors, and the bytes of one of their elements once it is stretched."""
    return [
        (Canvas.of(case, pair), factor ** len(pair.shape) * ITEM_SIZE[pair.dtype]) for pair in case.direct
    ]  # fmt: skip


def _domains(case: PlanCase) -> list[tuple[int, ...]]:
    domains = dict.fromkeys(case.domain_of(rank) for rank in case.ranks)
    return [tuple(rank for rank in case.ranks if case.domain_of(rank) == domain) for domain in domains]


def _crossing(canvas: Canvas, members: tuple[int, ...]) -> np.ndarray:
    """Elements that these ranks need and do not hold."""
    needed = np.any([canvas.needs[rank] for rank in members], axis=0)
    return needed & ~np.any([canvas.holds[rank] for rank in members], axis=0)


def _sets(masks: Mapping[int, np.ndarray], where: np.ndarray) -> Loads:
    """How many of the elements `where` lie in which set of masks."""
    found: Loads = Counter()
    for place in zip(*np.nonzero(where), strict=True):
        found[frozenset(rank for rank, mask in masks.items() if mask[place])] += 1
    return found


def _stretched(held: Held, factor: int) -> Held:
    if not isinstance(held, Boxes):
        return held
    return Boxes(tuple((rank, tuple(_grown(box, factor) for box in boxes)) for rank, boxes in held.by_rank))


def _grown(box: tuple[tuple[int, ...], tuple[int, ...]], factor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offset, extent = box
    return tuple(start * factor for start in offset), tuple(size * factor for size in extent)
