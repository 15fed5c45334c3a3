"""Relays and pace: who passes what on, and in which order tensors start."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from equipment import virtual_models
from equipment.declaring import layout, refit
from equipment.plan_runs import assert_delivered

from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.pace import paced
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.plan.relay import ALL, Chains, in_chains
from nemo_rl_reshard.topology import Link, Topology, from_preset
from nemo_rl_reshard.virtual.megatron import megatron_source
from nemo_rl_reshard.virtual.places import Place
from nemo_rl_reshard.virtual.vllm import vllm_target


@pytest.mark.parametrize(
    ("num_domains", "share", "distances"),
    [
        (1, 0, (0,)),
        (4, ALL, (0, 0, 0, 0)),
        (4, ALL // 2, (0, 1, 0, 1)),
        (3, 0, (0, 1, 2)),
        (16, 0, (*range(8), *range(8))),
    ],
)
def test_chains_start_where_trainers_send_and_end_after_eight(num_domains, share, distances):
    assert Chains().distances(num_domains, share, "group") == distances


@pytest.mark.parametrize("share", [ALL // 7, ALL // 3, ALL * 5 // 6])
def test_over_many_regions_of_a_group_trainers_send_their_share(share):
    chains = Chains()
    heads = Counter()
    for place in range(120):
        heads[place % 2] += chains.distances(6, share, place % 2).count(0)
    for group in (0, 1):
        assert abs(heads[group] - 360 * share / ALL) <= max(1, 60 - 360 * share / ALL)


def test_those_who_send_most_end_the_chains():
    distances = (0, 1, 2, 0, 1)
    assert in_chains([0, 0, 0, 0, 0], distances, 2) == [2, 3, 0, 4, 1], "of equals, turns decide"
    order = in_chains([9, 1, 8, 2, 3], distances, 0)
    assert {order[2], order[4]} == {0, 2}
    assert sorted(order) == [0, 1, 2, 3, 4]


def test_every_chained_engine_passes_on_as_much_as_the_others():
    """Two trainers hold row halves, engines of two need column halves: no side may have all the long chains."""
    shape = (3072, 2048)
    given, wanted = layout(shape, (2,), "S(0)", (0, 1)), layout(shape, (2, 2), "R S(1)", range(2, 6))
    specs = [TensorSpec(f"model.layers.{index}.mlp.up_proj.weight", shape, "float32") for index in range(8)]
    topology = Topology(domains=((0, 1), (2, 3), (4, 5)))
    found = refit(
        [(spec, given, wanted) for spec in specs], (0, 1), range(2, 6), topology, PlanOptions(bucket_bytes=32 << 20)
    )
    sent = Counter()
    for each in found.plan.transfers():
        if each.link is Link.NETWORK:
            sent[each.src] += each.region.numel
    assert sent[0] == sent[1] > 0
    assert sent[2] == sent[3] == sent[4] == sent[5] > 0


def test_one_trainer_sends_once_and_three_engines_pass_it_on():
    """Four domains of one rank each, one trainer: direct sends would be four times what a receiver takes in."""
    given, wanted = layout((8, 4), (1,), "R", (0,)), layout((8, 4), (4,), "R", range(1, 5))
    specs = [TensorSpec(f"model.layers.{index}.mlp.up_proj.weight", (8, 4), "float32") for index in range(8)]
    found = refit([(spec, given, wanted) for spec in specs], (0,), range(1, 5), Topology())
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    assert_delivered(found)
    sent = Counter(each.src for each in found.plan.transfers() if each.link is Link.NETWORK)
    assert sent[0] == 8, "each tensor leaves the trainer once"
    assert sent.total() == 8 * 4
    assert max(sent[rank] for rank in range(1, 5)) <= 8, "no engine passes on more than it received"


def test_series_run_side_by_side_each_in_model_order():
    names = [f"{stage}.{index}" for stage in "abc" for index in range(10)]
    found = paced(names, {name: name[0] for name in names})
    assert sorted(found) == sorted(names)
    for stage in "abc":
        assert [name for name in found if name[0] == stage] == [name for name in names if name[0] == stage]
    for start in range(0, 30, 6):
        assert Counter(name[0] for name in found[start : start + 6]) == {"a": 2, "b": 2, "c": 2}


def test_a_short_series_is_spread_over_the_whole():
    names = [f"long.{index}" for index in range(90)] + [f"short.{index}" for index in range(3)]
    found = paced(names, {name: name.split(".")[0] for name in names})
    places = [found.index(f"short.{index}") for index in range(3)]
    assert all(before + 25 <= after for before, after in pairwise(places))


def test_about_one_layer_of_each_stage_is_open_at_a_time():
    """What an engine that packs its layers holds besides the weights: layers of which a part has come, and not all."""
    model = virtual_models.experts(layers=24, num_experts=16, hidden=1024, inner=512)
    source = megatron_source(model, world=8, pp=4, ep=2)
    target = vllm_target(model, world=8, tp=4, dp=2, first_rank=8)
    topology = from_preset("dgx-h100", [source.ranks, target.ranks])
    routes = decide_routes(source, target, RoutePolicy.ALL, model.architecture)
    plan = make_plan(source, target, routes, topology, PlanOptions(bucket_bytes=4 << 20, message_bytes=1 << 20))
    steps = defaultdict(set)
    for each in plan.transfers():
        if (layer := Place.of(each.tensor).layer) is not None:
            steps[layer].add(each.step)
    assert len(steps) == 24
    still_open = Counter(step for own in steps.values() for step in range(min(own), max(own) + 1))
    assert plan.num_steps > 24
    assert still_open.total() <= 1.5 * 4 * plan.num_steps
    assert max(still_open.values()) <= 3 * 4
