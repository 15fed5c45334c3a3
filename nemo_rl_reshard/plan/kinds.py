"""Kinds: tensors that are alike but for which ranks play which role are looked at once, however many they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.overlay import Demand, overlay
from nemo_rl_reshard.plan.plan import Crew

_Key = tuple[tuple[int, ...], int, int, int, object]  # shape, item size, patterns of both sides, what they share


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors of one shape and item size whose layouts are equal once ranks are replaced by roles.

    Roles count the trainers that hold the tensor in order of their ranks, then the other ranks that need it. `source`,
    `target`, `demands` and `domains` (role -> domain, counted by first appearance) speak of roles. `crews` maps every
    cast of those roles to the names of its tensors, both in order of the tensors given.
    """

    shape: tuple[int, ...]
    item_size: int
    source: TensorLayout
    target: TensorLayout
    domains: tuple[int, ...]
    demands: tuple[Demand, ...]
    crews: Mapping[Crew, tuple[str, ...]]

    @property
    def num_tensors(self) -> int:
        """Tensors of all crews."""
        return sum(map(len, self.crews.values()))

    def casts(self) -> Iterator[tuple[Crew, int]]:
        """Every crew and the number of its tensors."""
        return ((crew, len(names)) for crew, names in self.crews.items())


def kinds_of(
    names: Iterable[str],
    source: Catalog,
    target: Catalog,
    domain_of: Mapping[int, int],
    whole: frozenset[str] = frozenset(),
) -> tuple[Kind, ...]:
    """The kinds of the tensors `names`, in order of their first tensor.

    A tensor of `whole`, or one that the target calls indirect and gives no regions for, is needed whole by every
    target rank: its loader alone knows what it will keep.
    """
    pairs: dict[tuple[tuple[int, ...], int, int, int], list[str]] = {}
    everywhere: dict[tuple[int, ...], TensorLayout] = {}
    wanted_of: dict[int, TensorLayout] = {}
    given_of: dict[int, TensorLayout] = {}
    for name in names:
        spec, given, wanted = target.specs[name], source.layouts[name], target.layouts[name]
        if name in whole or not wanted.held:
            wanted = everywhere.get(spec.shape) or everywhere.setdefault(
                spec.shape, needed_whole(spec.shape, target.ranks)
            )
        given_of[id(given)], wanted_of[id(wanted)] = given, wanted
        pairs.setdefault((spec.shape, spec.item_size, id(given), id(wanted)), []).append(name)
    parts = _Parts(domain_of)
    alike: dict[_Key, dict[Crew, tuple[str, ...]]] = {}
    example: dict[_Key, tuple[TensorLayout, TensorLayout]] = {}
    for (shape, item_size, given_id, wanted_id), members in pairs.items():
        given, wanted = given_of[given_id], wanted_of[wanted_id]
        crew, cross = parts.cast(given, wanted)
        key = (shape, item_size, parts.pattern(given), parts.pattern(wanted), cross)
        example.setdefault(key, (given, wanted))
        crews = alike.setdefault(key, {})
        crews[crew] = crews.get(crew, ()) + tuple(members)
    return tuple(_kind(key[0], key[1], *example[key], crews, domain_of) for key, crews in alike.items())


def _kind(
    shape: tuple[int, ...],
    item_size: int,
    given: TensorLayout,
    wanted: TensorLayout,
    crews: Mapping[Crew, tuple[str, ...]],
    domain_of: Mapping[int, int],
) -> Kind:
    """The kind of these crews; `given` and `wanted` are the layouts of the first of them."""
    crew = next(iter(crews))
    role = {rank: index for index, rank in enumerate(crew)}
    labels: dict[int, int] = {}
    domains = tuple(labels.setdefault(domain_of[rank], len(labels)) for rank in crew)
    held, needed = _in_roles(given, role), _in_roles(wanted, role)
    return Kind(shape, item_size, held, needed, domains, overlay(held, needed, dict(enumerate(domains))), crews)


def needed_whole(shape: tuple[int, ...], ranks: Iterable[int]) -> TensorLayout:
    """The layout of a tensor of which every rank needs everything."""
    return TensorLayout.from_regions(shape, {rank: [Region.whole(shape)] for rank in ranks})


class _Parts:
    """What two layouts have in common once their ranks are forgotten; each layout is looked at once."""

    def __init__(self, domain_of: Mapping[int, int]) -> None:
        self._domain_of = domain_of
        self._patterns: dict[object, int] = {}
        self._of_layout: dict[int, tuple[int, Crew, tuple[int, ...]]] = {}  # pattern, ranks, domain of each

    def pattern(self, layout: TensorLayout) -> int:
        """A number for the regions by role and the domains by first appearance."""
        return self._look_at(layout)[0]

    def cast(self, given: TensorLayout, wanted: TensorLayout) -> tuple[Crew, object]:
        """The crew of a pair, and what ranks and domains its two sides share, in roles; None for nothing."""
        _, sources, source_domains = self._look_at(given)
        _, targets, target_domains = self._look_at(wanted)
        if set(source_domains).isdisjoint(target_domains):
            return sources + targets, None
        place = {rank: index for index, rank in enumerate(sources)}
        first: dict[int, int] = {}
        for index, domain in enumerate(source_domains):
            first.setdefault(domain, index)
        cross = tuple((place.get(rank, -1), first.get(d, -1)) for rank, d in zip(targets, target_domains, strict=True))
        return sources + tuple(rank for rank in targets if rank not in place), cross

    def _look_at(self, layout: TensorLayout) -> tuple[int, Crew, tuple[int, ...]]:
        found = self._of_layout.get(id(layout))
        if found is None:
            ranks = layout.ranks
            domains = tuple(self._domain_of[rank] for rank in ranks)
            labels: dict[int, int] = {}
            key = (
                layout.shape,
                tuple(regions for _, regions in layout.held),
                tuple(labels.setdefault(domain, len(labels)) for domain in domains),
            )
            found = (self._patterns.setdefault(key, len(self._patterns)), ranks, domains)
            self._of_layout[id(layout)] = found
        return found


def _in_roles(layout: TensorLayout, role: Mapping[int, int]) -> TensorLayout:
    return TensorLayout(layout.shape, tuple(sorted((role[rank], regions) for rank, regions in layout.held)))
