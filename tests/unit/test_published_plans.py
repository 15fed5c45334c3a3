"""Our plans of the published refits: the floor's bytes, and a predicted time near the floor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_rl_reshard.cli.spec import read_spec
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.statistics import statistics

SPECS = Path(__file__).parents[2] / "configs" / "plans"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "route", "most"),
    [
        ("qwen3-30b-a3b-h100", RoutePolicy.ALL, 1.25),
        ("qwen3-30b-a3b-h100", RoutePolicy.FFN, 1.5),
        ("qwen3-235b-h100", RoutePolicy.ALL, 1.25),
        ("qwen3-235b-h100", RoutePolicy.FFN, 1.5),
        ("deepseek-v3-h100", RoutePolicy.ALL, 1.25),
        ("deepseek-v3-h100", RoutePolicy.FFN, 1.5),
        ("deepseek-v3-gb200", RoutePolicy.ALL, 1.25),
        ("deepseek-v3-gb200", RoutePolicy.FFN, 1.5),
        ("nemotron-ultra-550b-gb200", RoutePolicy.ALL, 1.25),
        ("nemotron-ultra-550b-gb200", RoutePolicy.FFN, 1.5),
        ("qwen3.5-397b-h100", RoutePolicy.ALL, 1.25),
        ("qwen3.5-397b-h100", RoutePolicy.FFN, 1.5),
        ("qwen3.8-2.4t-gb200", RoutePolicy.ALL, 1.25),
        ("qwen3.8-2.4t-gb200", RoutePolicy.FFN, 1.5),
    ],
)
def test_published_rows_are_planned_near_their_floor(name: str, route: RoutePolicy, most: float) -> None:
    spec = read_spec(SPECS / f"{name}.yaml")
    spec = replace(spec, routes=decide_routes(spec.source, spec.target, route))
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    check_plan(plan, spec.source, spec.target, spec.routes, spec.topology)
    told = statistics(plan, spec.source, spec.target, spec.topology)
    assert (
        told["predicted"]["floor_seconds"] < told["predicted"]["seconds"] <= most * told["predicted"]["floor_seconds"]
    )
    if route is RoutePolicy.ALL:
        assert told["totals"]["network_bytes"] == told["totals"]["network_bytes_floor"]
        assert told["balance"]["max_network_send_over_optimum"] <= 1.02
