"""Totals, floors and predictions of plans whose figures can be worked out by hand."""

import json

import pytest
from equipment.declaring import GATE, catalog, layout, one_tensor, refit, rows

from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.statistics import statistics, transfers_to_plain
from nemo_rl_reshard.topology import Topology


def told(found):
    return statistics(found.plan, found.source, found.target, found.topology)


def test_rows_to_columns():
    found = one_tensor((8, 8), ((2,), "S(0)", (0, 1)), ((4,), "S(1)", (2, 3, 4, 5)))
    result = told(found)
    totals = result["totals"]
    assert totals["unique_bytes"] == totals["direct_bytes"] == 256
    assert totals["leftover_bytes"] == totals["fast_bytes"] == totals["local_bytes"] == 0
    assert totals["network_bytes"] == totals["network_bytes_floor"] == 256
    # Each of 2 trainers gathers the half it lacks, each of 4 receivers gets all of it.
    assert totals["gather_broadcast_bytes"] == 2 * 128 + 4 * 256
    assert result["per_rank"][0] == {
        "rank": 0,
        "network_send": 128,
        "network_recv": 0,
        "fast_send": 0,
        "fast_recv": 0,
        "pack_bytes": 128,
    }
    assert result["balance"] == {
        "max_network_send_over_mean": 1.0,
        "max_network_recv_over_mean": 1.0,
        "max_network_send_over_optimum": 1.0,
    }
    # Only copies: each trainer must send 128 bytes at 50 GB/s.
    assert result["predicted"]["floor_seconds"] == pytest.approx(128 / 50e9)


def test_tp4_to_tp2_dp2_in_one_domain():
    topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))
    totals = told(one_tensor((8, 8), ((4,), "S(0)", range(4)), ((2, 2), "R S(0)", range(4, 8)), topology))["totals"]
    assert (totals["network_bytes"], totals["network_bytes_floor"], totals["fast_bytes"]) == (256, 256, 256)
    assert totals["unique_bytes"] == 256
    assert totals["gather_broadcast_bytes"] == 4 * 192 + 4 * 256


@pytest.mark.parametrize(
    ("domains", "floor", "bottleneck"),
    [
        # One receiver per domain: 1024 bytes over one network link; the trainers hold replicas.
        ((), 1024 / 50e9, "inbound of domain"),
        # Both receivers in one domain: 1024 bytes over two links = 10.24 ns, before 1024 over network and fast.
        (((2, 3),), 512 / 50e9, "inbound of domain"),
        # A trainer in the receivers' domain: nothing must enter it.
        (((0, 2, 3),), 1024 / 500e9, "inbound of rank"),
    ],
)
def test_floor_seconds(domains, floor, bottleneck):
    found = one_tensor((16, 16), ((2,), "R", (0, 1)), ((2,), "R", (2, 3)), Topology(domains=domains))
    predicted = told(found)["predicted"]
    assert predicted["floor_seconds"] == pytest.approx(floor)
    assert predicted["floor_bottleneck"].startswith(bottleneck)
    assert predicted["seconds"] > predicted["floor_seconds"]


def test_phases_sum_to_the_prediction():
    predicted = told(one_tensor((64, 64), ((4,), "S(0)", range(4)), ((2,), "S(1)", (4, 5))))["predicted"]
    assert sum(predicted["phases"].values()) == pytest.approx(predicted["seconds"])


def mixed():
    """A feed-forward tensor, a norm and a tensor that the engine computes with."""
    names = [GATE, "model.norm.weight", "model.layers.0.self_attn.kv_b_proj.weight"]
    given, wanted = layout((4, 2), (2,), "S(0)", (0, 1)), layout((4, 2), (2,), "R", (2, 3))
    specs = [TensorSpec(name, (4, 2), "float32") for name in names]
    source = catalog(Side.TRAINER, (0, 1), [(spec, given) for spec in specs])
    nothing = rows((4, 2), {})
    wants = [(specs[0], wanted), (specs[1], wanted), (specs[2], nothing)]
    return source, catalog(Side.INFERENCE, (2, 3), wants, {names[2]: "absorbed into other weights"})


def test_leftovers_enter_each_domain_once_from_all_who_hold_them():
    source, target = mixed()
    topology = Topology(domains=((0, 1), (2, 3)))
    plan = make_plan(source, target, decide_routes(source, target, RoutePolicy.FFN), topology)
    result = statistics(plan, source, target, topology)
    totals = result["totals"]
    assert totals["unique_bytes"] == 96
    assert (totals["direct_bytes"], totals["leftover_bytes"]) == (32, 64)
    assert (totals["network_bytes"], totals["fast_bytes"], totals["network_bytes_floor"]) == (96, 96, 96)
    assert [row["network_send"] for row in result["per_rank"]] == [48, 48, 0, 0]
    assert [left["bytes"] for left in result["leftovers"]] == [32, 32]
    assert result["leftovers"][1]["reason"] == "inference: absorbed into other weights"
    assert {transfer["tensor"] for transfer in transfers_to_plain(plan)} == {GATE}


def test_leftovers_that_are_broadcast_count_by_the_stated_rule():
    source, target = mixed()
    topology = Topology(domains=((0, 1), (2, 3)))
    plan = make_plan(source, target, decide_routes(source, target, RoutePolicy.FFN), topology, broadcast=True)
    result = statistics(plan, source, target, topology)
    totals = result["totals"]
    # Direct: 32 over the network, 32 fast. Leftovers: both trainers gather 16 twice (fast), 64 go over the network to
    # rank 2 and by a fast link on to rank 3.
    assert totals["network_bytes"] == 32 + 64
    assert totals["fast_bytes"] == 32 + 2 * 2 * 16 + 64
    assert totals["gather_broadcast_bytes"] == 3 * (2 * 16 + 2 * 32)
    assert result["predicted"]["phases"]["leftover"] > 0


def test_everything_as_leftovers_moves_what_gather_and_broadcast_moves():
    source, target = mixed()
    routes = decide_routes(source, target, RoutePolicy.ALL)
    leftover = next(route for route in routes.values() if route.kind == "leftover")
    plan = make_plan(source, target, dict.fromkeys(routes, leftover), Topology(), broadcast=True)
    totals = statistics(plan, source, target, Topology())["totals"]
    moved = totals["network_bytes"] + totals["fast_bytes"] + totals["local_bytes"]
    assert moved == totals["gather_broadcast_bytes"]


def test_per_rank_sums_to_the_totals():
    topology = Topology(domains=((0, 1), (2, 3, 4), (5,)))
    found = one_tensor((7, 6), ((2,), "S(0)", (0, 1)), ((2, 2), "R S(1)", (2, 3, 4, 5)), topology)
    result = told(found)
    for link in ("network", "fast"):
        assert sum(row[f"{link}_send"] for row in result["per_rank"]) == result["totals"][f"{link}_bytes"]
        assert sum(row[f"{link}_recv"] for row in result["per_rank"]) == result["totals"][f"{link}_bytes"]


def test_statistics_and_transfers_are_json_and_the_same_every_time():
    def text():
        found = one_tensor((7, 6), ((2,), "S(0)", (0, 1)), ((2, 2), "R S(1)", (2, 3, 4, 5)))
        return json.dumps({**told(found), "transfers": transfers_to_plain(found.plan)})

    assert text() == text()
    steps = [transfer["step"] for transfer in json.loads(text())["transfers"]]
    assert steps == sorted(steps)


def test_balance_leaves_out_ranks_that_hold_or_need_nothing():
    """Three rows over four ranks on both sides: the last rank has none, and is no part of the mean."""
    found = one_tensor((3, 4), ((4,), "S(0)", range(4)), ((4,), "S(0)", range(4, 8)))
    assert [row["network_recv"] for row in told(found)["per_rank"]] == [0] * 4 + [16, 16, 16, 0]
    assert told(found)["balance"] == {
        "max_network_send_over_mean": 1.0,
        "max_network_recv_over_mean": 1.0,
        "max_network_send_over_optimum": 1.0,
    }


def test_a_partial_need_counts_only_what_is_needed():
    spec = TensorSpec(GATE, (8, 2), "float32")
    found = refit([(spec, rows((8, 2), {0: [(0, 8)]}), rows((8, 2), {1: [(1, 2)], 2: [(2, 2)]}))], (0,), (1, 2))
    totals = told(found)["totals"]
    assert totals["unique_bytes"] == 3 * 2 * 4
    assert totals["network_bytes"] == totals["network_bytes_floor"] == 4 * 2 * 4
