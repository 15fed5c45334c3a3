"""LayoutTable: one TensorLayout object per distinct content, made once per shape, cut and owners."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_reshard.errors import FaultList
from nemo_rl_reshard.layout import Mesh, Placement, Region, TensorLayout
from nemo_rl_reshard.virtual.cuts import WHOLE, Cut, FusedCut

Owners = tuple[tuple[int, ...], ...]  # the ranks that hold part 0, those that hold part 1, ...


class LayoutTable:
    """A model has many tensors and few layouts: equal ones come out as one object, which planners rely on."""

    def __init__(self) -> None:
        self._cut: dict[tuple[tuple[int, ...], Cut | FusedCut, Owners], TensorLayout] = {}
        self._placed: dict[tuple[tuple[int, ...], Mesh, tuple[Placement, ...]], TensorLayout] = {}
        self._distinct: dict[TensorLayout, TensorLayout] = {}

    def cut(self, shape: tuple[int, ...], cut: Cut | FusedCut, owners: Owners) -> TensorLayout:
        """The layout in which each part of `cut` is held by its owners, a rank owning one part."""
        key = (shape, cut, owners)
        if key not in self._cut:
            regions: dict[int, tuple[Region, ...]] = {}
            for index, ranks in enumerate(owners):
                regions |= dict.fromkeys(ranks, cut.regions(shape, index, len(owners)))
            self._cut[key] = self._one(TensorLayout.from_regions(shape, regions))
        return self._cut[key]

    def placed(self, shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> TensorLayout:
        """The layout that `placements`, one per axis of `mesh`, give."""
        key = (shape, mesh, placements)
        if key not in self._placed:
            self._placed[key] = self._one(TensorLayout.from_mesh(shape, mesh, placements))
        return self._placed[key]

    def _one(self, layout: TensorLayout) -> TensorLayout:
        return self._distinct.setdefault(layout, layout)


def whole(ranks: Sequence[int]) -> tuple[Cut, Owners]:
    """All of a tensor on each of `ranks`."""
    return WHOLE, (tuple(ranks),)


def is_divisible(faults: FaultList, tensor: str, role: str, cut: Cut | FusedCut, parts: int, size: str) -> bool:
    """Whether `tensor` can be cut into `parts`; notes why not. `size` names the field that asks for so many."""
    reason = cut.why_not(parts)
    if reason:
        faults.add(f"{size} {parts}: {tensor} and its like ({role}): {reason}; choose a {size} that divides them")
    return not reason
