"""Overlay: cut what sources hold with what each target domain needs, into demands that can be met one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import Cell, cut


@dataclass(frozen=True, slots=True)
class Demand:
    """`region` must reach all `needers`, which share one domain, from any of `holders`. Ranks ascend.

    `near` are the holders inside the needers' domain, ranks of both kinds included.
    """

    region: Region
    domain: int
    holders: tuple[int, ...]
    needers: tuple[int, ...]
    near: tuple[int, ...]


def overlay(source: TensorLayout, target: TensorLayout, domain_of: Mapping[int, int]) -> tuple[Demand, ...]:
    """Demands of one tensor by domain, each domain's regions in row-major order.

    They cover what the target needs exactly once per domain. `domain_of` must name every rank. A demand without
    holders is kept, for the caller to refuse.
    """
    holders_of: defaultdict[Region, list[int]] = defaultdict(list)
    for rank, regions in source.held:
        for region in regions:
            holders_of[region].append(rank)
    given = sorted(holders_of)
    needers_of: defaultdict[int, defaultdict[Region, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, regions in target.held:
        for region in regions:
            needers_of[domain_of[rank]][region].append(rank)
    cells_of: dict[tuple[Region, ...], tuple[Cell, ...]] = {}
    demands: list[Demand] = []
    for domain in sorted(needers_of):
        wanted = tuple(sorted(needers_of[domain]))
        if wanted not in cells_of:
            cells_of[wanted] = _cells(given, wanted)
        for cell in cells_of[wanted]:
            holders = sorted({rank for index in cell.inside if index < len(given) for rank in holders_of[given[index]]})
            needers = sorted(
                {
                    rank
                    for index in cell.inside
                    if index >= len(given)
                    for rank in needers_of[domain][wanted[index - len(given)]]
                }
            )
            near = tuple(rank for rank in holders if domain_of[rank] == domain)
            demands.append(Demand(cell.region, domain, tuple(holders), tuple(needers), near))
    return tuple(demands)


def _cells(given: list[Region], wanted: tuple[Region, ...]) -> tuple[Cell, ...]:
    """Cells that some target region needs; indices below len(given) are source regions, the others targets'."""
    # Sources that touch no wanted region would only add cuts.
    used = [(index, region) for index, region in enumerate(given) if any(region.intersect(want) for want in wanted)]
    index_of = [index for index, _ in used] + [len(given) + index for index in range(len(wanted))]
    cells = cut([region for _, region in used] + list(wanted))
    return tuple(
        Cell(cell.region, tuple(index_of[index] for index in cell.inside))
        for cell in cells
        if index_of[cell.inside[-1]] >= len(given)
    )
