"""Kinds: equal tensors as one, so that a baseline looks at each pair of layouts once, however many tensors share it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import volume
from nemo_rl_reshard.params.catalog import Catalog


@dataclass(frozen=True)
class Kind:
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


def kinds_of(names: Iterable[str], source: Catalog, target: Catalog) -> tuple[Kind, ...]:
    """The kinds of the tensors `names`, in order of their first tensor.

    A tensor that the target calls indirect and gives no regions for is needed whole by every target rank.
    """
    groups: dict[tuple[tuple[int, ...], int, int, int], list[str]] = {}
    for name in names:
        spec = target.specs[name]
        key = (spec.shape, spec.item_size, id(source.layouts[name]), id(target.layouts[name]))
        groups.setdefault(key, []).append(name)
    whole: dict[tuple[int, ...], TensorLayout] = {}
    kinds = []
    for (shape, item_size, _, _), members in groups.items():
        wanted = target.layouts[members[0]]
        if not wanted.held:
            if shape not in whole:
                whole[shape] = TensorLayout.from_regions(shape, {rank: [Region.whole(shape)] for rank in target.ranks})
            wanted = whole[shape]
        kinds.append(Kind(shape, item_size, len(members), source.layouts[members[0]], wanted))
    return tuple(kinds)


class Volumes:
    """Elements that ranks and domains hold of layouts. Remembers each layout and each set of regions it measured.

    Regions are cut to the shape asked for: padding of the source beyond the target's shape does not travel.
    """

    def __init__(self, domain_of: Mapping[int, int]) -> None:
        self._domain_of = domain_of
        self._volumes: dict[frozenset[Region], int] = {}
        self._domains: dict[tuple[int, tuple[int, ...]], tuple[TensorLayout, dict[int, frozenset[Region]]]] = {}
        self._holders: dict[tuple[int, tuple[int, ...]], tuple[TensorLayout, dict[Region, tuple[int, ...]]]] = {}

    def holders(self, layout: TensorLayout, shape: tuple[int, ...]) -> Mapping[Region, tuple[int, ...]]:
        """Distinct region -> the ranks that hold it."""
        key = (id(layout), shape)
        if key not in self._holders:
            whole = Region.whole(shape)
            found: defaultdict[Region, list[int]] = defaultdict(list)
            for rank, regions in layout.held:
                for region in regions:
                    inside = region if layout.shape == shape else region.intersect(whole)
                    if inside is not None:
                        found[inside].append(rank)
            # The layout is kept with the result: its identity stays taken as long as the key is.
            self._holders[key] = layout, {region: tuple(ranks) for region, ranks in found.items()}
        return self._holders[key][1]

    def regions_of_domains(self, layout: TensorLayout, shape: tuple[int, ...]) -> Mapping[int, frozenset[Region]]:
        """Domain -> the distinct regions that its ranks hold, for domains that hold any."""
        key = (id(layout), shape)
        if key not in self._domains:
            found: defaultdict[int, set[Region]] = defaultdict(set)
            for region, ranks in self.holders(layout, shape).items():
                for rank in ranks:
                    found[self._domain_of[rank]].add(region)
            self._domains[key] = layout, {domain: frozenset(regions) for domain, regions in found.items()}
        return self._domains[key][1]

    def union(self, regions: frozenset[Region]) -> int:
        """Elements in the union of `regions`."""
        if regions not in self._volumes:
            self._volumes[regions] = volume(list(regions)) if regions else 0
        return self._volumes[regions]

    def common(self, first: frozenset[Region], second: frozenset[Region]) -> int:
        """Elements that lie in a region of both sets."""
        return self.union(first) + self.union(second) - self.union(first | second)

    def of_ranks(self, layout: TensorLayout, shape: tuple[int, ...]) -> Counter[int]:
        """Rank -> elements it holds."""
        held: Counter[int] = Counter()
        for region, ranks in self.holders(layout, shape).items():
            for rank in ranks:
                held[rank] += region.numel
        return held
