"""Checkpoint tensors that only the model's adapter can make, of gathered training tensors, anew at each refit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch

from nemo_rl_reshard import layout
from nemo_rl_reshard.errors import DeclarationError, StateError
from nemo_rl_reshard.layout import Mesh, Region, TensorLayout
from nemo_rl_reshard.sources.adapter_map import AdapterMap, Unproven


@dataclass(frozen=True, slots=True)
class Exported:
    """One such tensor, the training tensor `stored` (of plain name `plain`) it follows from, and this rank's share."""

    made: Unproven
    stored: str
    plain: str
    share: tuple[Region, ...]


class WholeExports:
    """Makes them on refit rank `rank`, which keeps a share of each, so that the ranks together keep one copy.

    One training tensor is whole in memory at a time. Where no mesh places it, every rank's share is all. Shares lie
    where training keeps the shards they follow from. Without an adapter there is nothing to make.
    """

    def __init__(self, rank: int, adapter: AdapterMap | None) -> None:
        self._rank = rank
        self._adapter = adapter
        self._exported: dict[str, Exported] = {}
        self._kept: dict[tuple[str, Region], torch.Tensor] = {}

    def __iter__(self) -> Iterator[Exported]:
        return iter(self._exported.values())

    def __contains__(self, name: object) -> bool:
        return name in self._exported

    def add(self, stored: str, plain: str, made: Iterable[Unproven], mesh: Mesh | None) -> None:
        """Note what the adapter makes of `stored`, which `mesh` places."""
        for unproven in made:
            self._exported[unproven.name] = Exported(unproven, stored, plain, _share(unproven.shape, mesh, self._rank))

    def make(self, whole_of: Callable[[str], torch.Tensor], local_of: Callable[[str], torch.Tensor]) -> None:
        """Make all, in model order, from whole training tensors; collective if `whole_of` is.

        `local_of` gives this rank's shard of one. Raises DeclarationError if the adapter changed its mind.
        """
        self._kept = {}
        for stored, members in groupby(self, key=attrgetter("stored")):
            group, device = list(members), local_of(stored).device
            assert self._adapter is not None
            made = dict(self._adapter.export(group[0].plain, whole_of(stored)))
            for exported in group:
                name, value = exported.made.name, made.get(exported.made.name)
                if value is None or tuple(value.shape) != exported.made.shape or value.dtype != exported.made.dtype:
                    raise DeclarationError(f"{name}: the adapter makes it otherwise than was declared; declare again")
                for region in exported.share:
                    self._kept[name, region] = value.detach()[region.slices].to(device, copy=True)

    def release(self) -> None:
        """Drop the values."""
        self._kept = {}

    def view(self, name: str, region: Region) -> torch.Tensor:
        """The elements of `region`. Raises DeclarationError for one in no share, StateError outside a refit."""
        share = next((part for part in self._exported[name].share if part.contains(region)), None)
        if share is None:
            raise DeclarationError(f"{name}: rank {self._rank} holds no {region.offset}+{region.extent} in one piece")
        if (name, share) not in self._kept:
            raise StateError(f"{name}: it is made at the start of a refit, and none is under way")
        return self._kept[name, share][region.relative_to(share).slices]


def _share(shape: tuple[int, ...], mesh: Mesh | None, rank: int) -> tuple[Region, ...]:
    """Rows of a tensor dealt out over all ranks of `mesh`; all of it where there are no rows or no mesh."""
    if mesh is None or not shape:
        return (Region.whole(shape),)
    line = Mesh(("trainers",), (len(mesh.ranks),), mesh.ranks)
    return tuple(TensorLayout.from_mesh(shape, line, (layout.Shard(0),)).regions_of(rank))
