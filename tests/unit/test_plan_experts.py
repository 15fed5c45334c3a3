"""Experts: destinations come from the engine's own map, whatever it is."""

import pytest
from equipment.declaring import refit, rows
from equipment.plan_runs import assert_delivered, deliver, wholes_of

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_plan

STACKED = TensorSpec("model.layers.0.mlp.experts.down_proj", (8, 2, 3), "float32")


def experts(shape, owned):
    """A layout of whole experts of a stacked tensor: rank -> expert numbers."""
    return TensorLayout.from_regions(
        shape, {rank: [Region((e, 0, 0), (1, *shape[1:])) for e in found] for rank, found in owned.items()}
    )


@pytest.mark.parametrize("owned", [{2: [0, 1, 2, 3], 3: [4, 5, 6, 7]}, {2: [0, 2, 4, 6], 3: [1, 3, 5, 7]}])
def test_b25_linear_and_round_robin_maps_both_get_their_own_experts(owned):
    given = experts(STACKED.shape, {0: range(4), 1: range(4, 8)})
    found = refit([(STACKED, given, experts(STACKED.shape, owned))], (0, 1), (2, 3))
    wholes = wholes_of(found, 1)
    got = deliver(found, wholes)
    for rank, mine in owned.items():
        for expert in mine:
            assert (got[STACKED.name, rank][expert] == wholes[STACKED.name][expert]).all()
    assert_delivered(found, version=2)


def test_b26_ten_experts_over_four_ranks_follow_the_receivers_map():
    spec = TensorSpec("model.layers.0.mlp.experts.up_proj", (10, 1, 2), "float32")
    wanted = rows(spec.shape, {2: [(0, 3)], 3: [(3, 3)], 4: [(6, 2)], 5: [(8, 2)]})
    found = refit([(spec, rows(spec.shape, {0: [(0, 5)], 1: [(5, 5)]}), wanted)], (0, 1), (2, 3, 4, 5))
    starts = {rank: min(t.region.offset[0] for t in found.plan.transfers() if t.dst == rank) for rank in (2, 3, 4, 5)}
    assert starts == {2: 0, 3: 3, 4: 6, 5: 8}
    assert_delivered(found)


def test_b27_redundant_experts_on_several_ranks_are_all_written():
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj.weight" for expert in range(4)]
    slots = {4: [0, 1, 2], 5: [3, 0, 2]}
    tensors = []
    for expert, name in enumerate(names):
        owners = {rank: [(0, 2)] for rank, mine in slots.items() if expert in mine}
        tensors.append((TensorSpec(name, (2, 3), "float32"), rows((2, 3), {expert: [(0, 2)]}), rows((2, 3), owners)))
    found = refit(tensors, range(4), (4, 5))
    came = {(t.dst, t.tensor) for t in found.plan.transfers()}
    assert came == {(rank, names[expert]) for rank, mine in slots.items() for expert in mine}
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    assert_delivered(found)


def test_b19_stacked_and_single_experts_are_cut_alike():
    shape = (2, 4, 3)  # gate rows, then up rows, of each expert
    spec = TensorSpec("model.layers.0.mlp.experts.gate_up_proj", shape, "float32")
    halves = {
        rank: [Region((e, start + rank - 2, 0), (1, 1, 3)) for e in range(2) for start in (0, 2)] for rank in (2, 3)
    }
    wanted = TensorLayout.from_regions(shape, halves)
    found = refit([(spec, rows(shape, {0: [(0, 1)], 1: [(1, 1)]}), wanted)], (0, 1), (2, 3))
    wholes = wholes_of(found, 1)
    got = deliver(found, wholes)
    assert (got[spec.name, 2][1, [0, 2]] == wholes[spec.name][1, [0, 2]]).all()
    assert (got[spec.name, 2][1, [1, 3]] == -1).all()
    assert_delivered(found, version=2)


def test_b30_fewer_key_heads_than_engine_ranks_are_replicated_in_pairs():
    spec = TensorSpec("model.layers.0.self_attn.k_proj.weight", (8, 3), "float32")  # 2 heads of 4 rows
    wanted = rows(spec.shape, {2: [(0, 4)], 3: [(0, 4)], 4: [(4, 4)], 5: [(4, 4)]})
    found = refit([(spec, rows(spec.shape, {0: [(0, 5)], 1: [(5, 3)]}), wanted)], (0, 1), (2, 3, 4, 5))
    assert_delivered(found)
