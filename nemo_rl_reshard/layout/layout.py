"""TensorLayout: which regions of one tensor each rank holds or needs, in a normal form that compares by meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from nemo_rl_reshard.errors import LayoutError
from nemo_rl_reshard.layout.mesh import Mesh
from nemo_rl_reshard.layout.placement import Placement, Replicate, Shard, StridedShard, chunk
from nemo_rl_reshard.layout.region import Region

Interval = tuple[int, int]  # start, length
_Cut = tuple[int, int]  # mesh axis, split factor of an interleaved cut (1 for a plain one)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Regions of a tensor of `shape`, per rank. Ranks ascend, regions ascend, empty ones are dropped.

    Two layouts that give every rank the same regions are equal and hash alike, however they were written.
    """

    shape: tuple[int, ...]
    held: tuple[tuple[int, tuple[Region, ...]], ...]

    @classmethod
    def from_regions(cls, shape: tuple[int, ...], regions: Mapping[int, Iterable[Region]]) -> TensorLayout:
        """Build from explicit regions. Raises LayoutError for a region outside `shape` or of another rank."""
        whole = Region.whole(tuple(shape))
        held = []
        for rank in sorted(regions):
            kept = tuple(sorted(region for region in regions[rank] if not region.is_empty))
            for region in kept:
                if len(region.extent) != len(whole.extent) or not whole.contains(region):
                    raise LayoutError(f"rank {rank}: region {region.offset}+{region.extent} is outside shape {shape}")
            if kept:
                held.append((rank, kept))
        return cls(tuple(shape), tuple(held))

    @classmethod
    def from_mesh(cls, shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> TensorLayout:
        """Apply `placements`, one per mesh axis, left to right. Raises LayoutError for a rule that does not fit."""
        shape = tuple(shape)
        cuts = _cuts_by_dim(shape, mesh, placements)
        regions: dict[int, list[Region]] = {}
        for rank, coordinate in mesh.coordinates():
            per_dim = [_intervals(size, cuts[dim], mesh, coordinate) for dim, size in enumerate(shape)]
            regions[rank] = [
                Region(tuple(start for start, _ in box), tuple(length for _, length in box))
                for box in product(*per_dim)
            ]
        return cls.from_regions(shape, regions)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold at least one element."""
        return tuple(rank for rank, _ in self.held)

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """Regions of one rank; empty for a rank that holds nothing."""
        return next((regions for holder, regions in self.held if holder == rank), ())


def _cuts_by_dim(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> list[list[_Cut]]:
    """For each dim the cuts in the order they apply: a strided axis comes after the later axes it names."""
    if len(placements) != len(mesh.shape):
        raise LayoutError(f"{len(placements)} placements for a mesh of {len(mesh.shape)} axes")
    cuts: list[list[_Cut]] = [[] for _ in shape]
    for axis in reversed(range(len(placements))):
        placement, size = placements[axis], mesh.shape[axis]
        if isinstance(placement, Replicate) or size == 1:
            continue
        if not isinstance(placement, Shard | StridedShard):
            raise LayoutError(f"axis {mesh.axis_names[axis]} has {placement!r}: a sum is not a weight, reduce it first")
        if placement.dim >= len(shape):
            raise LayoutError(f"{placement} on axis {mesh.axis_names[axis]}: shape {shape} has no dim {placement.dim}")
        order = cuts[placement.dim]
        if isinstance(placement, Shard):
            order.insert(0, (axis, 1))
        elif not order:
            order.append((axis, placement.split_factor))
        elif prod(mesh.shape[later] for later, _ in order) == placement.split_factor:
            order.append((axis, 1))
        else:
            sizes = [mesh.shape[later] for later, _ in order]
            raise LayoutError(
                f"{placement} on axis {mesh.axis_names[axis]}: later axes that shard dim {placement.dim} have sizes "
                f"{sizes}, whose product must be the split factor {placement.split_factor}"
            )
    return cuts


def _intervals(size: int, cuts: list[_Cut], mesh: Mesh, coordinate: tuple[int, ...]) -> list[Interval]:
    """What one mesh coordinate keeps of a dim of `size`: disjoint ascending intervals, [(0, 0)] when nothing."""
    kept: list[Interval] = [(0, size)]
    for axis, factor in cuts:
        total = sum(length for _, length in kept)
        parts, index = mesh.shape[axis] * factor, coordinate[axis]
        # Pieces beyond the elements are empty, however many the split factor asks for.
        pieces = [chunk(total, parts, index + turn * mesh.shape[axis]) for turn in range(min(factor, total))]
        kept = [found for start, length in pieces for found in _take(kept, start, length)]
    return kept or [(0, 0)]


def _take(intervals: list[Interval], start: int, length: int) -> list[Interval]:
    """The part [start, start + length) of the concatenation of `intervals`, as intervals of the original dim."""
    found = []
    position = 0
    for begin, size in intervals:
        low, high = max(start, position), min(start + length, position + size)
        if low < high:
            found.append((begin + low - position, high - low))
        position += size
    return found
