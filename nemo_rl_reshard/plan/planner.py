"""The planner: two catalogs, routes and a topology become one sealed plan, pass by pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_rl_reshard.errors import FaultList, PlanError
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.routing import Route, RouteKind
from nemo_rl_reshard.plan.balance import Cast, Choice, assign
from nemo_rl_reshard.plan.codec import seal
from nemo_rl_reshard.plan.kinds import Kind, kinds_of
from nemo_rl_reshard.plan.pace import paced
from nemo_rl_reshard.plan.pieces import share
from nemo_rl_reshard.plan.plan import Crew, Placed, Plan, PlanOptions, Template
from nemo_rl_reshard.plan.relay import look_ahead
from nemo_rl_reshard.plan.schedule import Flow, Schedule, Variant
from nemo_rl_reshard.plan.transfer import Leftover
from nemo_rl_reshard.topology import Topology

__all__ = ["PlanOptions", "make_plan"]

_Turn = tuple[int, int, int]  # template, variant, crew


def make_plan(
    source: Catalog,
    target: Catalog,
    routes: Mapping[str, Route],
    topology: Topology,
    options: PlanOptions | None = None,
    *,
    broadcast: bool = False,
) -> Plan:
    """Plan a whole refit. Deterministic: equal input gives an equal plan and digest on every machine.

    What travels has the target's shape and dtype; the source may be padded beyond that shape. Leftovers travel beside
    the rest, whole and to every target rank, from all trainers that hold parts of them; with `broadcast` they are named
    and not placed, for the conventional gather and broadcast. Raises one PlanError listing the tensors for which no
    correct plan exists.
    """
    options = options or PlanOptions()
    ranks = sorted({*source.ranks, *target.ranks})
    domain_of = topology.domains_with(ranks)
    left = [name for name in target.specs if routes[name].kind is RouteKind.LEFTOVER]
    moving = [
        name
        for name in target.specs
        if routes[name].kind is RouteKind.DIRECT or (routes[name].kind is RouteKind.LEFTOVER and not broadcast)
    ]
    kinds = kinds_of(moving, source, target, domain_of, whole=frozenset(left))
    _refuse_unmet(kinds)
    choices = [
        Choice(
            share(kind.demands, kind.item_size, options.bucket_bytes),
            kind.item_size,
            len(kind.source.held),
            tuple(kind.casts()),
        )
        for kind in kinds
    ]
    casts = assign(choices, options.bucket_bytes, look_ahead(kinds, domain_of))
    placing = _Placing(kinds, choices, casts, options)
    placed = placing.place(moving, Schedule(ranks, options.bucket_bytes))
    leftovers = tuple(Leftover(name, target.specs[name].nbytes, routes[name].reason) for name in left)
    return seal(
        Plan(
            options=options,
            specs={name: target.specs[name] for name in target.specs if routes[name].kind is not RouteKind.SKIP},
            templates=placing.templates,
            crews=placing.crews,
            placed=placed,
            leftovers=leftovers,
            skipped={name: route.reason for name, route in routes.items() if route.kind is RouteKind.SKIP},
            sources=source.ranks,
            targets=target.ranks,
        )
    )


def _refuse_unmet(kinds: Sequence[Kind]) -> None:
    """Raise PlanError listing what no source holds."""
    faults = FaultList("planning", PlanError)
    for kind in kinds:
        for demand in kind.demands:
            if not demand.holders:
                crew, names = next(iter(kind.crews.items()))
                faults.add(
                    f"{names[0]}: rank {crew[demand.needers[0]]} needs offset {demand.region.offset} extent "
                    f"{demand.region.extent}, which no trainer holds"
                )
    faults.raise_if_any()


class _Placing:
    """Gives every tensor its turn (template, variant, crew) and its step."""

    def __init__(
        self, kinds: Sequence[Kind], choices: Sequence[Choice], casts: Sequence[Cast], options: PlanOptions
    ) -> None:
        self._casts = casts
        self._crews: dict[Crew, int] = {}
        self._cast_of: dict[str, tuple[int, int, int]] = {}  # tensor -> template, crew, the crew's place in its kind
        self._variants: list[list[Variant]] = []
        templates = []
        for index, (kind, choice, cast) in enumerate(zip(kinds, choices, casts, strict=True)):
            template = Template(kind.shape, kind.item_size, choice.pieces, cast.variants)
            variants = [Variant(template, moves, options.bucket_bytes) for moves in cast.variants]
            self._variants.append(variants)
            timed = [
                moves
                if variant.lags is None
                else tuple(move._replace(lag=lag) for move, lag in zip(moves, variant.lags, strict=True))
                for moves, variant in zip(cast.variants, variants, strict=True)
            ]
            templates.append(replace(template, variants=tuple(timed)))
            for place, (crew, names) in enumerate(kind.crews.items()):
                number = self._crews.setdefault(crew, len(self._crews))
                self._cast_of.update((name, (index, number, place)) for name in names)
        self.templates = tuple(templates)
        self.crews = tuple(self._crews)

    def place(self, names: Sequence[str], schedule: Schedule) -> tuple[Placed, ...]:
        """Rows by step; within a step in the order in which tensors start."""
        rows = []
        flows: dict[_Turn, Flow] = {}
        passed: Counter[tuple[int, int]] = Counter()
        for name in paced(names, {name: cast[:2] for name, cast in self._cast_of.items()}):
            index, crew, place = self._cast_of[name]
            cast = self._casts[index]
            used = cast.of_crew[place]
            counter = (index, -1 if cast.in_turn else place)
            variant = used[passed[counter] % len(used)]
            passed[counter] += 1
            turn = (index, variant, crew)
            if turn not in flows:
                flows[turn] = schedule.flow(self._variants[index][variant], self.crews[crew])
            rows.append(Placed(name, *turn, schedule.place(flows[turn])))
        return tuple(sorted(rows, key=lambda row: row.step))
