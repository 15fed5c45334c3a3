"""Volumes: how many elements ranks and domains hold of a layout, each layout measured once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import volume


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
