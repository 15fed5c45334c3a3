"""Placing one live tensor: the regions this rank holds by its DTensor, and where they lie in the local tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from nemo_rl_reshard import layout
from nemo_rl_reshard.errors import DeclarationError, LayoutError
from nemo_rl_reshard.layout import Mesh, Region, TensorLayout

LayoutKey = tuple[object, ...]
"""What a tensor's placing follows from; see `layout_key`."""

RankOf = Callable[[int], int]
"""Rank in the trainers' own world -> rank in the refit world."""


@dataclass(frozen=True, slots=True)
class Block:
    """A region of the training tensor, and where in the local tensor its first element is."""

    region: Region
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """One live tensor on this rank. A plain tensor has no mesh. `key` tells whether the layout is still the same."""

    mesh: Mesh | None
    blocks: tuple[Block, ...]
    key: LayoutKey


class Placer:
    """Places the tensors of refit rank `rank`. Equal layouts are worked out once."""

    def __init__(self, rank: int, rank_of: RankOf) -> None:
        self._rank = rank
        self._rank_of = rank_of
        self._blocks: dict[tuple[object, ...], tuple[Block, ...]] = {}

    def place(self, name: str, tensor: torch.Tensor) -> Placed:
        """What this rank holds of `tensor`. Raises DeclarationError naming `name`, the rank, expected and found.

        A plain tensor counts as the whole tensor: whether it is the same on every rank is for `replicas` to prove.
        """
        local = local_tensor(tensor)
        if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.layout != torch.strided:
            raise DeclarationError(f"{name}: rank {self._rank} holds a {type(local).__name__}, not a dense tensor")
        if local.is_meta:
            raise DeclarationError(f"{name}: rank {self._rank} holds it on the meta device; load its values first")
        mesh, placements = self._mesh_of(name, tensor) if isinstance(tensor, DTensor) else (None, ())
        shape, found = tuple(tensor.shape), tuple(local.shape)
        blocks = self._blocks_of(name, shape, mesh, placements)
        expected = _local_shape(blocks)
        if found != expected if blocks else local.numel() > 0:
            rules = ", ".join(map(str, placements))
            raise DeclarationError(
                f"{name}: of shape {shape} under ({rules}) rank {self._rank} should hold a local tensor "
                f"{f'of shape {expected}' if blocks else 'without elements'}, and holds one of shape {found}"
            )
        return Placed(mesh, blocks, layout_key(tensor))

    def _mesh_of(self, name: str, tensor: DTensor) -> tuple[Mesh, tuple[layout.Placement, ...]]:
        """Our mesh and placements for a DTensor's own."""
        device_mesh = tensor.device_mesh
        names = device_mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(device_mesh.ndim))
        ranks = tuple(self._rank_of(rank) for rank in device_mesh.mesh.flatten().tolist())
        mesh = Mesh(tuple(names), tuple(device_mesh.mesh.shape), ranks)
        placements = tuple(
            translate(name, placement, axis, size, tensor.ndim)
            for placement, axis, size in zip(tensor.placements, mesh.axis_names, mesh.shape, strict=True)
        )
        for axis, placement in enumerate(placements):
            along = device_mesh.mesh.diff(dim=axis)
            if not isinstance(placement, layout.Replicate) and bool((along < 0).any()):
                raise DeclarationError(
                    f"{name}: ranks of mesh {device_mesh.mesh.tolist()} do not ascend along axis {names[axis]!r}, "
                    "which shards it. torch orders a group's ranks ascending, so collectives and mesh coordinates "
                    "disagree on who holds which shard; build the mesh in ascending order"
                )
        return mesh, placements

    def _blocks_of(
        self, name: str, shape: tuple[int, ...], mesh: Mesh | None, placements: tuple[layout.Placement, ...]
    ) -> tuple[Block, ...]:
        key = (shape, mesh, placements)
        if key not in self._blocks:
            if mesh is None:
                whole = TensorLayout.from_regions(shape, {self._rank: [Region.whole(shape)]})
            else:
                try:
                    whole = TensorLayout.from_mesh(shape, mesh, placements)
                except LayoutError as fault:
                    raise DeclarationError(f"{name}: {fault}") from fault
            self._blocks[key] = locate(whole.regions_of(self._rank))
        return self._blocks[key]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own storage of `tensor`, without a copy and outside autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout_key(tensor: torch.Tensor) -> LayoutKey:
    """Global shape, dtype, local shape, device mesh and placements: cheap to take and to compare."""
    local = local_tensor(tensor)
    if isinstance(tensor, DTensor):
        return (tensor.shape, tensor.dtype, local.shape, tensor.device_mesh, tensor.placements)
    return (tensor.shape, tensor.dtype, local.shape, None, ())


def translate(name: str, placement: object, axis: str, size: int, ndim: int) -> layout.Placement:
    """Our placement for torch's, on a mesh axis of `size`. Any placement on an axis of size 1 cuts nothing.

    Raises DeclarationError for a placement that is no weight (Partial) or that is unknown.
    """
    if size == 1 or isinstance(placement, Replicate):
        return layout.Replicate()
    # First the strided one: torch 2.13 keeps it outside Shard, an older or newer one may make it a subclass.
    if isinstance(placement, _StridedShard):
        if placement.split_factor == 1:
            return layout.Shard(placement.dim % ndim)
        return layout.StridedShard(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, Shard):
        return layout.Shard(placement.dim % ndim)
    raise DeclarationError(
        f"{name}: placement {placement!r} on mesh axis {axis!r} of size {size}: a sum is not a weight, reduce it first"
    )


def locate(regions: Sequence[Region]) -> tuple[Block, ...]:
    """Where each of one rank's regions starts in its local tensor, which packs the kept intervals of each dim."""
    starts = []
    for intervals in _intervals(regions):
        begins = [0, *accumulate(length for _, length in intervals)]
        starts.append(dict(zip((begin for begin, _ in intervals), begins, strict=False)))
    return tuple(
        Block(region, tuple(start[offset] for start, offset in zip(starts, region.offset, strict=True)))
        for region in regions
    )


def _intervals(regions: Sequence[Region]) -> list[list[tuple[int, int]]]:
    """Per dim, the distinct (first, length) intervals that the regions keep, ascending."""
    boxes = [zip(region.offset, region.extent, strict=True) for region in regions]
    return [sorted(set(intervals)) for intervals in zip(*boxes, strict=True)]


def _local_shape(blocks: Sequence[Block]) -> tuple[int, ...]:
    return tuple(sum(length for _, length in intervals) for intervals in _intervals([block.region for block in blocks]))
