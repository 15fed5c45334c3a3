"""The planner: two catalogs, routes and a topology become one sealed plan, pass by pass."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_reshard.errors import FaultList, PlanError
from nemo_rl_reshard.layout import TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.routing import Route, RouteKind
from nemo_rl_reshard.plan.balance import Choice, assign, share
from nemo_rl_reshard.plan.codec import seal
from nemo_rl_reshard.plan.overlay import Demand, overlay
from nemo_rl_reshard.plan.plan import Move, Placed, Plan, PlanOptions, Template
from nemo_rl_reshard.plan.schedule import Schedule
from nemo_rl_reshard.plan.transfer import Leftover
from nemo_rl_reshard.topology import Topology

__all__ = ["PlanOptions", "make_plan"]

_TemplateKey = tuple[tuple[int, ...], int, int, int]  # shape, item size, identities of both layouts


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
    members: dict[_TemplateKey, list[str]] = {}
    for name in direct:
        spec = target.specs[name]
        key = (spec.shape, spec.item_size, id(source.layouts[name]), id(target.layouts[name]))
        members.setdefault(key, []).append(name)
    choices = _choices(members, source, target, domain_of, options)
    variants = assign(choices)
    templates, placed = _place(direct, members, choices, variants, ranks, options)
    leftovers = tuple(
        Leftover(name, target.specs[name].nbytes, routes[name].reason)
        for name in target.specs
        if routes[name].kind is RouteKind.LEFTOVER
    )
    return seal(
        Plan(
            options=options,
            specs={name: target.specs[name] for name in target.specs if routes[name].kind is not RouteKind.SKIP},
            templates=templates,
            placed=placed,
            leftovers=leftovers,
            skipped={name: route.reason for name, route in routes.items() if route.kind is RouteKind.SKIP},
            sources=source.ranks,
            targets=target.ranks,
        )
    )


def _choices(
    members: Mapping[_TemplateKey, list[str]],
    source: Catalog,
    target: Catalog,
    domain_of: Mapping[int, int],
    options: PlanOptions,
) -> list[Choice]:
    """The demands of every template, shared among replicas. Raises PlanError where no source holds an element."""
    faults = FaultList("planning", PlanError)
    overlays: dict[tuple[int, int], tuple[Demand, ...]] = {}
    choices = []
    for (_, item_size, _, _), names in members.items():
        layouts: tuple[TensorLayout, TensorLayout] = (source.layouts[names[0]], target.layouts[names[0]])
        key = (id(layouts[0]), id(layouts[1]))
        if key not in overlays:
            overlays[key] = overlay(*layouts, domain_of)
        demands = overlays[key]
        unmet = [demand for demand in demands if not demand.holders]
        faults.extend(
            f"{names[0]}: rank {demand.needers[0]} needs offset {demand.region.offset} extent {demand.region.extent}, "
            "which no trainer holds"
            for demand in unmet
        )
        if not unmet:
            shared = share(demands, item_size, len(names), options.bucket_bytes)
            choices.append(Choice(shared, item_size, len(names)))
    faults.raise_if_any()
    return choices


def _place(
    direct: list[str],
    members: Mapping[_TemplateKey, list[str]],
    choices: list[Choice],
    variants: list[tuple[tuple[Move, ...], ...]],
    ranks: list[int],
    options: PlanOptions,
) -> tuple[tuple[Template, ...], tuple[Placed, ...]]:
    """Give every direct tensor its variant and step, in model order."""
    schedule = Schedule(ranks, options.bucket_bytes)
    flows = []
    templates = []
    turn: dict[str, tuple[int, int]] = {}
    for index, ((shape, item_size, _, _), names) in enumerate(members.items()):
        sizes = [demand.region.numel * item_size for demand in choices[index].demands]
        prepared = [schedule.prepare((sizes, moves)) for moves in variants[index]]
        flows.append(prepared)
        timed = tuple(
            moves
            if flow.lags is None
            else tuple(move._replace(lag=lag) for move, lag in zip(moves, flow.lags, strict=True))
            for moves, flow in zip(variants[index], prepared, strict=True)
        )
        templates.append(Template(shape, item_size, tuple(demand.region for demand in choices[index].demands), timed))
        for position, name in enumerate(names):
            turn[name] = (index, position % len(timed))
    placed = []
    for name in direct:
        template, variant = turn[name]
        placed.append(Placed(name, template, variant, schedule.place(flows[template][variant])))
    return tuple(templates), tuple(placed)
