"""Needs: what all target ranks need of all tensors, grouped so that equal tensors are looked at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.overlay import Demand, overlay


@dataclass(frozen=True, slots=True)
class Need:
    """`num_tensors` tensors of one shape, item size and pair of layouts, with the demands of one of them."""

    shape: tuple[int, ...]
    item_size: int
    num_tensors: int
    source: TensorLayout
    target: TensorLayout
    demands: tuple[Demand, ...]


def needs_of(names: Iterable[str], source: Catalog, target: Catalog, domain_of: Mapping[int, int]) -> tuple[Need, ...]:
    """The needs of the tensors `names`, in order of their first tensor.

    A tensor that the target calls indirect and gives no regions for is needed whole by every target rank: its loader
    alone knows what it will keep.
    """
    groups: dict[tuple[tuple[int, ...], int, int, int], list[str]] = {}
    for name in names:
        spec = target.specs[name]
        key = (spec.shape, spec.item_size, id(source.layouts[name]), id(target.layouts[name]))
        groups.setdefault(key, []).append(name)
    needs = []
    for (shape, item_size, _, _), members in groups.items():
        given, wanted = source.layouts[members[0]], target.layouts[members[0]]
        if not wanted.held:
            wanted = TensorLayout.from_regions(shape, {rank: [Region.whole(shape)] for rank in target.ranks})
        demands = overlay(given, wanted, domain_of)
        needs.append(Need(shape, item_size, len(members), given, wanted, demands))
    return tuple(needs)
