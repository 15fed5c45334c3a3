"""PlanBook: the plans of one pair of declarations, each made once and kept until the declarations change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard.config import Backend, RefitConfig
from nemo_rl_reshard.errors import StateError
from nemo_rl_reshard.params.catalog import Catalog, merge
from nemo_rl_reshard.params.manifest import Manifest
from nemo_rl_reshard.params.match import allowed_skips, check_match
from nemo_rl_reshard.params.routing import Route, RouteKind, decide_routes
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.plan import Plan, PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.handout import Handout, hand_out
from nemo_rl_reshard.simulate.statistics import statistics
from nemo_rl_reshard.sources.replicas import RegionDigest, check_replicas

PlainManifest = Mapping[str, Any]


def source_catalog(declared: Mapping[int, Mapping[str, Any]]) -> Catalog:
    """The trainers' side, which engines are traced against, from what every trainer rank declared.

    Raises DeclarationError listing every fault, unequal replicas included.
    """
    check_replicas(
        {rank: [RegionDigest.from_plain(plain) for plain in each["replicas"]] for rank, each in declared.items()}
    )
    return merge([Manifest.from_plain(each["manifest"]) for each in declared.values()])


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and its summary: what `nemo-rl-reshard plan --json` writes."""

    plan: Plan
    summary: Mapping[str, Any]

    @property
    def floor_s(self) -> float:
        """The time that no schedule can beat on links of nominal speed."""
        return float(self.summary["predicted"]["floor_seconds"])


class PlanBook:
    """Holds what both sides declared, and at most one plan per backend. `num_plans` counts the plans ever made."""

    def __init__(self, config: RefitConfig) -> None:
        self._config = config
        self._source: Catalog | None = None
        self._target: Catalog | None = None
        self._hosts: dict[int, str] = {}
        self._plans: dict[Backend, Planned] = {}
        self._handouts: dict[tuple[Backend, bool], Handout] = {}
        self.num_plans = 0

    def declare(self, source: Catalog, manifests: Sequence[PlainManifest], hosts: Mapping[int, str]) -> None:
        """Take the declarations of a world: the trainers' catalog, and the manifests of the inference ranks.

        `hosts` says on which host each rank runs. Plans survive if everything is as before. Raises DeclarationError
        listing every fault of the inference side, or of the pair.
        """
        target = merge([Manifest.from_plain(manifest) for manifest in manifests])
        if (source, target, hosts) == (self._source, self._target, self._hosts):
            return
        self._plans.clear()
        self._handouts.clear()
        self._source = self._target = None
        check_match(source, target, allowed_skips(source, target, self._config.architecture))
        self._source, self._target, self._hosts = source, target, dict(hosts)

    def plan_for(self, backend: Backend) -> Planned:
        """The plan for `backend`, made and proven if there is none. Raises PlanError; StateError before `declare`."""
        if self._source is None or self._target is None:
            raise StateError("there is nothing to plan: the ranks have not declared yet")
        if backend not in self._plans:
            config = self._config
            routes = decide_routes(self._source, self._target, config.route, config.architecture)
            if backend is Backend.GATHER_BROADCAST:
                routes = {name: _conventional(route) for name, route in routes.items()}
            topology = config.topology.topology(self._hosts)
            options = PlanOptions(bucket_bytes=config.bucket_bytes, message_bytes=config.message_bytes)
            broadcast = backend is Backend.GATHER_BROADCAST
            plan = make_plan(self._source, self._target, routes, topology, options, broadcast=broadcast)
            check_plan(plan, self._source, self._target, routes, topology)
            summary = statistics(plan, self._source, self._target, topology)
            self._plans[backend] = Planned(plan, summary)
            self.num_plans += 1
        return self._plans[backend]

    def handout_for(self, backend: Backend, *, in_rounds: bool) -> Handout:
        """What ranks are given of the plan for `backend`, with rounds if the transport goes `in_rounds`. As above."""
        plan = self.plan_for(backend).plan
        assert self._source is not None
        made = self._handouts.get((backend, in_rounds))
        if made is None:
            made = hand_out(plan, self._source, in_flight=self._config.in_flight, in_rounds=in_rounds)
            self._handouts[backend, in_rounds] = made
        return made


def _conventional(route: Route) -> Route:
    """The route of a tensor when everything that moves is gathered and broadcast."""
    if route.kind is RouteKind.SKIP:
        return route
    return Route(RouteKind.LEFTOVER, "backend gather_broadcast")
