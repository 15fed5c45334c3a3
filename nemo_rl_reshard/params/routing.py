"""Which way each tensor goes, direct, leftover or skipped, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_reshard.errors import DeclarationError, FaultList
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.classify import ClassKind, classify, draft_layers, expert_group


class RoutePolicy(StrEnum):
    """FFN: only feed-forward projections go direct. ALL: whatever both sides prove direct does."""

    FFN = "ffn"
    ALL = "all"


class RouteKind(StrEnum):
    """DIRECT: region by region. LEFTOVER: gathered, broadcast, loaded by the engine's loader. SKIP: not sent."""

    DIRECT = "direct"
    LEFTOVER = "leftover"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Route:
    """The way one tensor goes, and why."""

    kind: RouteKind
    reason: str


def decide_routes(
    source: Catalog, target: Catalog, policy: RoutePolicy, architecture: str | None = None
) -> dict[str, Route]:
    """The route of every tensor that either side names: the target's in its order, then the source's others.

    A tensor is direct only if neither side calls it indirect. Experts of one layer go the same way. Raises
    DeclarationError listing the tensors that still carry the names of a LoRA wrapper.
    """
    faults = FaultList("deciding routes", DeclarationError)
    drafts = draft_layers(source.specs)
    routes: dict[str, Route] = {}
    wrapped: list[str] = []
    for name in (*target.specs, *(name for name in source.specs if name not in target.specs)):
        found = classify(name, architecture, drafts)
        if found.kind is ClassKind.WRAPPED:
            wrapped.append(name)
        elif found.kind is ClassKind.ADAPTER or name not in target.specs:
            routes[name] = Route(RouteKind.SKIP, found.reason)
        elif name in target.indirect:
            routes[name] = Route(RouteKind.LEFTOVER, f"inference: {target.indirect[name]}")
        elif name in source.indirect:
            routes[name] = Route(RouteKind.LEFTOVER, f"trainer: {source.indirect[name]}")
        elif policy is RoutePolicy.ALL:
            routes[name] = Route(RouteKind.DIRECT, "both sides prove it direct")
        elif found.kind is ClassKind.FEED_FORWARD:
            routes[name] = Route(RouteKind.DIRECT, found.reason)
        else:
            routes[name] = Route(RouteKind.LEFTOVER, found.reason)
    if wrapped:
        faults.add(f"unmerged LoRA wrapper names {wrapped}: merge the adapters, then send the plain names")
    faults.raise_if_any()
    _keep_groups_whole(routes)
    return routes


def _keep_groups_whole(routes: dict[str, Route]) -> None:
    """Send a group of experts as leftovers when one of its members must go so."""
    cause: dict[str, str] = {}
    for name, route in routes.items():
        group = expert_group(name)
        if group is not None and route.kind is RouteKind.LEFTOVER:
            cause.setdefault(group, name)
    if not cause:
        return
    for name, route in routes.items():
        group = expert_group(name)
        if group in cause and route.kind is RouteKind.DIRECT:
            member = cause[group]
            routes[name] = Route(RouteKind.LEFTOVER, f"goes with {member}: {routes[member].reason}")
