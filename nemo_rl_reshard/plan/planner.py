"""The planner: two catalogs, routes and a topology become one sealed plan, pass by pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_rl_reshard.errors import FaultList, PlanError
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.routing import Route, RouteKind
from nemo_rl_reshard.plan.balance import Cast, Choice, assign, share
from nemo_rl_reshard.plan.codec import seal
from nemo_rl_reshard.plan.kinds import Kind, kinds_of
from nemo_rl_reshard.plan.pace import paced
from nemo_rl_reshard.plan.plan import Crew, Placed, Plan, PlanOptions, Template
from nemo_rl_reshard.plan.relay import direct_shares
from nemo_rl_reshard.plan.schedule import Flow, Schedule
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
) -> Plan:
    """Plan a whole refit. Deterministic: equal input gives an equal plan and digest on every machine.

    What travels has the target's shape and dtype; the source may be padded beyond that shape. Raises one PlanError
    listing the tensors for which no correct plan exists.
    """
    options = options or PlanOptions()
    ranks = sorted({*source.ranks, *target.ranks})
    domain_of = topology.domains_with(ranks)
    direct = [name for name in target.specs if routes[name].kind is RouteKind.DIRECT]
    kinds = kinds_of(direct, source, target, domain_of)
    _refuse_unmet(kinds)
    choices = [
        Choice(
            share(kind.demands, kind.item_size, min(map(len, kind.crews.values())), options.bucket_bytes),
            kind.item_size,
            tuple(kind.casts()),
        )
        for kind in kinds
    ]
    casts = assign(choices, direct_shares(kinds, domain_of))
    placing = _Placing(kinds, choices, casts, Schedule(ranks, options.bucket_bytes))
    placed = placing.place(direct)
    leftovers = tuple(
        Leftover(name, target.specs[name].nbytes, routes[name].reason)
        for name in target.specs
        if routes[name].kind is RouteKind.LEFTOVER
    )
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
        self, kinds: Sequence[Kind], choices: Sequence[Choice], casts: Sequence[Cast], schedule: Schedule
    ) -> None:
        self._schedule = schedule
        self._crews: dict[Crew, int] = {}
        self._turns: dict[str, _Turn] = {}
        self._flows: dict[_Turn, Flow] = {}
        self._groups: dict[Crew, int] = {}  # trainers that hold the same tensors
        self._holders: dict[str, int] = {}
        self._nbytes: dict[str, int] = {}
        self.templates = tuple(
            self._take_turns(index, kind, Template(kind.shape, kind.item_size, choice.pieces, cast.variants), cast)
            for index, (kind, choice, cast) in enumerate(zip(kinds, choices, casts, strict=True))
        )
        self.crews = tuple(self._crews)

    def place(self, names: Sequence[str]) -> tuple[Placed, ...]:
        """Rows by step; within a step in the order in which tensors start."""
        rows = []
        for name in paced(names, self._holders, self._nbytes):
            turn = self._turns[name]
            rows.append(Placed(name, *turn, self._schedule.place(self._flows[turn])))
        return tuple(sorted(rows, key=lambda row: row.step))

    def _take_turns(self, index: int, kind: Kind, template: Template, cast: Cast) -> Template:
        """The tensors of a crew use its variants one after the other. The template with the lags they then have."""
        num_holders = len(kind.source.held)
        nbytes = sum(demand.region.numel for demand in kind.demands) * kind.item_size
        receivers = [sorted({move.dst for move in moves if move.dst != move.src}) for moves in template.variants]
        alike: dict[tuple[int, Crew], Flow] = {}  # crews that receive alike have one flow
        variants = list(template.variants)
        for (crew, names), used in zip(kind.crews.items(), cast.of_crew, strict=True):
            place = self._crews.setdefault(crew, len(self._crews))
            holders = self._groups.setdefault(crew[:num_holders], len(self._groups))
            for variant in set(used):
                key = (variant, tuple(crew[role] for role in receivers[variant]))
                if key not in alike:
                    alike[key] = self._schedule.flow(template, template.variants[variant], crew)
                flow = self._flows[index, variant, place] = alike[key]
                if flow.lags is not None:
                    variants[variant] = tuple(
                        move._replace(lag=lag) for move, lag in zip(template.variants[variant], flow.lags, strict=True)
                    )
            for position, name in enumerate(names):
                self._turns[name] = (index, used[position % len(used)], place)
                self._holders[name] = holders
                self._nbytes[name] = nbytes
        return replace(template, variants=tuple(variants))
