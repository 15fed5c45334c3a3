"""Cutting sets of regions against each other, and the proofs that regions cover a box exactly once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl_reshard.layout.region import Region

_Box = tuple[tuple[int, ...], tuple[int, ...]]  # first and last + 1 coordinate, per dim
_Alike = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # what joined boxes share


@dataclass(frozen=True, slots=True)
class Cell:
    """A region whose elements all lie in the same of the given regions: those at the indices `inside`, ascending."""

    region: Region
    inside: tuple[int, ...]


def cut(regions: Sequence[Region]) -> tuple[Cell, ...]:
    """Cut `regions`, which may overlap in any way, into disjoint cells in row-major order.

    Every element of a region is in exactly one cell, and a cell lies wholly inside each region that it names. Cells
    that differ only by a needless cut are joined again. All regions must have the same number of dims.
    """
    kept = [(index, region) for index, region in enumerate(regions) if not region.is_empty]
    if not kept:
        return ()
    first = kept[0][1]
    if all(region == first for _, region in kept):
        return (Cell(first, tuple(index for index, _ in kept)),)
    dims = range(len(first.extent))
    bounds = [sorted({edge for _, region in kept for edge in (region.offset[dim], region.stop[dim])}) for dim in dims]
    labels = np.zeros([len(edges) - 1 for edges in bounds], dtype=np.int64)
    meaning: list[tuple[int, ...]] = [()]
    for index, region in kept:
        corner = tuple(
            slice(bisect_left(edges, start), bisect_left(edges, stop))
            for edges, start, stop in zip(bounds, region.offset, region.stop, strict=True)
        )
        old, inverse = np.unique(labels[corner], return_inverse=True)
        fresh = np.arange(len(meaning), len(meaning) + len(old))
        meaning.extend((*meaning[label], index) for label in old.tolist())
        labels[corner] = fresh[inverse].reshape(labels[corner].shape)
    return tuple(
        Cell(
            Region(
                tuple(bounds[dim][box[0][dim]] for dim in dims),
                tuple(bounds[dim][box[1][dim]] - bounds[dim][box[0][dim]] for dim in dims),
            ),
            meaning[label],
        )
        for box, label in _joined(labels)
    )


def _joined(labels: np.ndarray) -> list[tuple[_Box, int]]:
    """The boxes of equal non-zero label in a grid, joined along the last dim first, in row-major order."""
    where = np.argwhere(labels)
    values = labels[tuple(where.T)].tolist()
    boxes: list[tuple[_Box, int]] = [
        ((tuple(at), tuple(coordinate + 1 for coordinate in at)), label)
        for at, label in zip(where.tolist(), values, strict=True)
    ]
    for dim in reversed(range(labels.ndim)):
        longest: dict[tuple[_Alike, int], _Box] = {}
        # Boxes come in row-major order, so a box meets its lower neighbour along `dim` before itself.
        for (start, stop), label in boxes:
            alike = (label, start[:dim], start[dim + 1 :], stop[:dim], stop[dim + 1 :])
            below = longest.pop((alike, start[dim]), None)
            longest[alike, stop[dim]] = (below[0] if below is not None else start, stop)
        boxes = sorted((box, alike[0]) for (alike, _), box in longest.items())
    return boxes


def gaps(whole: Region, regions: Sequence[Region]) -> tuple[Region, ...]:
    """The parts of `whole` that none of `regions` covers, as disjoint regions; empty when the cover is complete."""
    if whole.is_empty or any(region.contains(whole) for region in regions):
        return ()
    return tuple(cell.region for cell in cut([whole, *regions]) if cell.inside == (0,))


def overlaps(regions: Sequence[Region]) -> tuple[Region, ...]:
    """The parts that more than one of `regions` covers, as disjoint regions; empty when all are disjoint."""
    if len(regions) < 2:
        return ()
    return tuple(cell.region for cell in cut(regions) if len(cell.inside) > 1)


def volume(regions: Sequence[Region]) -> int:
    """Elements in the union of `regions`."""
    distinct = sorted(set(regions))
    if len(distinct) == 1:
        return distinct[0].numel
    return sum(cell.region.numel for cell in cut(distinct))


def bounded(region: Region, most: int) -> tuple[Region, ...]:
    """`region` cut along its outermost dims into near-equal pieces of at most `most` elements, `most` >= 1."""
    if region.numel <= most:
        return (region,)
    dim = next(index for index, extent in enumerate(region.extent) if extent > 1)
    per_slice = region.numel // region.extent[dim]
    parts = -(-region.extent[dim] // max(1, most // per_slice))
    return tuple(piece for part in region.split(dim, parts) for piece in bounded(part, most))
