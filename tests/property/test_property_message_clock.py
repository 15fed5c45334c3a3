"""The step clock against a clock of single messages: near it, and neither below what the busiest NIC needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
from equipment import virtual_models
from equipment.declaring import Refit
from equipment.layout_matrix import LAYOUT_MATRIX
from equipment.message_clock import message_clock
from equipment.plan_case import PlanCase, planned

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.plan.step_loads import step_loads
from nemo_rl_reshard.simulate.recurrence import run_clock
from nemo_rl_reshard.topology import Topology, from_preset
from nemo_rl_reshard.virtual.fsdp2 import fsdp2_source
from nemo_rl_reshard.virtual.megatron import megatron_source
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.vllm import vllm_target

IN_FLIGHT = 64
"""Messages of 1 MiB, a bucket of them. Few large ones are less than a step where pairs have little to say at a time."""
LARGER = 1 << 18
"""How much larger the matrix' tensors are meant to be: as rates are as much lower, only the planner sees small ones."""


@dataclass(frozen=True)
class Case:
    """A model between two sides on a machine: from 8 to 64 ranks."""

    model: Callable[[], ModelShape]
    source: Callable[[ModelShape], Catalog]
    target: Callable[[ModelShape, int], Catalog]
    machine: str = "dgx-h100"


def dense() -> ModelShape:
    return virtual_models.dense(layers=12, hidden=2048, inner=8192, vocabulary=8192)


def experts() -> ModelShape:
    return virtual_models.experts(layers=6, num_experts=32, hidden=2048, inner=768)


def few_experts() -> ModelShape:
    return virtual_models.experts(layers=3, num_experts=16, hidden=2048, inner=512)


CASES = {
    "fsdp2 of 4 to TP2": Case(
        dense,
        lambda model: fsdp2_source(model, world=4, dp_shard=4),
        lambda model, first: vllm_target(model, world=4, tp=2, dp=2, first_rank=first),
    ),
    "TP2 x PP2 to TP2": Case(
        dense,
        lambda model: megatron_source(model, world=8, tp=2, pp=2),
        lambda model, first: vllm_target(model, world=8, tp=2, dp=4, first_rank=first),
    ),
    "experts, TP2 x PP2 x EP8 to TP4": Case(
        experts,
        lambda model: megatron_source(model, world=16, tp=2, pp=2, ep=8),
        lambda model, first: vllm_target(model, world=16, tp=4, dp=4, first_rank=first),
    ),
    "experts to whole experts on a rack": Case(
        experts,
        lambda model: megatron_source(model, world=16, pp=2, ep=8),
        lambda model, first: vllm_target(model, world=16, tp=2, dp=8, ep=16, first_rank=first),
        "gb200-nvl72",
    ),
    "few experts over 64 ranks": Case(
        few_experts,
        lambda model: megatron_source(model, world=32, tp=4, pp=2, ep=16),
        lambda model, first: vllm_target(model, world=32, tp=4, dp=8, first_rank=first),
    ),
}


@cache
def refit_of(name: str) -> Refit:
    """A case planned with buckets of `IN_FLIGHT` messages."""
    case = CASES[name]
    model = case.model()
    source = case.source(model)
    target = case.target(model, len(source.ranks))
    topology = from_preset(case.machine, [source.ranks, target.ranks])
    routes = decide_routes(source, target, RoutePolicy.ALL, model.architecture)
    options = PlanOptions(bucket_bytes=IN_FLIGHT << 20, message_bytes=1 << 20)
    return Refit(source, target, routes, topology, make_plan(source, target, routes, topology, options))


def busiest_nic_s(refit: Refit, topology: Topology) -> float:
    """Seconds that the busiest NIC needs in one direction, one rank on each."""
    loads = step_loads(refit.plan)
    most = max(loads.network_sent.sum(axis=0).max(), loads.network_received.sum(axis=0).max())
    return float(most) / (topology.network_bytes_per_s * topology.wire_efficiency)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_messages_take_what_the_step_clock_says_for_one_step_or_two_under_way(name: str) -> None:
    """A window of a bucket each way, message by message, is more than one step at once and less than two.

    It may end up to 15 % before two steps under way: the step clock lets a forward wait for all of the step before.
    """
    refit = refit_of(name)
    one, two = (run_clock(step_loads(refit.plan), refit.topology, window).end_s for window in (1, 2))
    assert 0.85 * two <= message_clock(refit.plan, refit.source, refit.topology, in_flight=IN_FLIGHT) <= 1.05 * one


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if "experts" in name])
def test_the_step_clock_is_right_to_a_tenth_for_experts(name: str) -> None:
    refit = refit_of(name)
    by_steps = run_clock(step_loads(refit.plan), refit.topology).end_s
    found = message_clock(refit.plan, refit.source, refit.topology, in_flight=IN_FLIGHT)
    assert found == pytest.approx(by_steps, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_clock_beats_the_busiest_nic(name: str) -> None:
    refit = refit_of(name)
    least = busiest_nic_s(refit, refit.topology)
    assert run_clock(step_loads(refit.plan), refit.topology).end_s >= least
    for in_rounds in (False, True):
        assert (
            message_clock(refit.plan, refit.source, refit.topology, in_flight=IN_FLIGHT, in_rounds=in_rounds) >= least
        )


@pytest.mark.parametrize("case", LAYOUT_MATRIX, ids=lambda case: case.name)
def test_in_plans_of_few_steps_the_clocks_differ_by_less_than_two_steps(case: PlanCase) -> None:
    """The step clock is late where what is forwarded came early in its step: at most a step for each of two hops."""
    bucket_bytes = 64
    refit = planned(replace(case, bucket_bytes=bucket_bytes, message_bytes=8))
    plain = refit.topology
    topology = replace(
        plain,
        network_bytes_per_s=plain.network_bytes_per_s / LARGER,
        fast_bytes_per_s=plain.fast_bytes_per_s / LARGER,
        memory_bytes_per_s=plain.memory_bytes_per_s / LARGER,
    )
    step_s = bucket_bytes / (topology.network_bytes_per_s * topology.wire_efficiency)
    by_steps = run_clock(step_loads(refit.plan), topology).end_s
    by_messages = message_clock(refit.plan, refit.source, topology)
    assert by_steps - 2 * step_s <= by_messages <= by_steps + step_s / 2
    assert min(by_steps, by_messages) >= busiest_nic_s(refit, topology)
