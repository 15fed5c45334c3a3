"""LayoutPair: equal tensors as one, so that a baseline looks at each pair of layouts once, however many share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.kinds import needed_whole


@dataclass(frozen=True)
class LayoutPair:
    """`num_tensors` tensors of one shape and item size whose layouts on both sides are the same."""

    shape: tuple[int, ...]
    item_size: int
    num_tensors: int
    source: TensorLayout
    target: TensorLayout

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return Region.whole(self.shape).numel * self.bytes_per_element

    @property
    def bytes_per_element(self) -> int:
        """Bytes that one position of the shape stands for, all tensors together."""
        return self.item_size * self.num_tensors


def layout_pairs(names: Iterable[str], source: Catalog, target: Catalog) -> tuple[LayoutPair, ...]:
    """The pairs of the tensors `names`, in order of their first tensor.

    A tensor that the target calls indirect and gives no regions for is needed whole by every target rank.
    """
    groups: dict[tuple[tuple[int, ...], int, int, int], list[str]] = {}
    for name in names:
        spec = target.specs[name]
        key = (spec.shape, spec.item_size, id(source.layouts[name]), id(target.layouts[name]))
        groups.setdefault(key, []).append(name)
    whole: dict[tuple[int, ...], TensorLayout] = {}
    pairs = []
    for (shape, item_size, _, _), members in groups.items():
        wanted = target.layouts[members[0]]
        if not wanted.held:
            if shape not in whole:
                whole[shape] = needed_whole(shape, target.ranks)
            wanted = whole[shape]
        pairs.append(LayoutPair(shape, item_size, len(members), source.layouts[members[0]], wanted))
    return tuple(pairs)
