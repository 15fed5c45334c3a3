"""The baselines on two trainers and two engine ranks, worked out by hand."""

from dataclasses import fields, replace

import pytest
from equipment.declaring import GATE, catalog, layout

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.simulate.baselines import (
    simulate_gather_broadcast,
    simulate_point_to_point,
    simulate_published,
)
from nemo_rl_reshard.simulate.constants import FITTED, Constants
from nemo_rl_reshard.simulate.simulation import PHASES
from nemo_rl_reshard.simulate.stages import call_of, stages_of
from nemo_rl_reshard.topology import Topology

SHAPE = (8, 8)
SIZE = 8 * 8 * 4  # bytes of one float32 tensor
PAIRS = Topology(
    domains=((0, 1), (2, 3)),
    network_bytes_per_s=1.0,
    fast_bytes_per_s=4.0,
    network_latency_s=0.0,
    fast_latency_s=0.0,
    memory_bytes_per_s=float("inf"),
    wire_efficiency=0.5,
)
"""Trainers 0 and 1 in one domain, engine ranks 2 and 3 in another; links reach half of 1 and of 4 B/s."""
ALONE = replace(PAIRS, domains=())
IDEAL = Constants(collective_fraction=0.5, copy_bytes_per_s=float("inf"), tensor_s=0.0, piece_s=0.0, refit_s=0.0)
"""No costs but those of links."""
ATTENTION = "model.layers.0.self_attn.o_proj.weight"


def sides(names=(GATE,), source="S(0)", target="S(1)"):
    given, wanted = layout(SHAPE, [2], source, [0, 1]), layout(SHAPE, [2], target, [2, 3])
    specs = [TensorSpec(name, SHAPE, "float32") for name in names]
    return (
        catalog(Side.TRAINER, [0, 1], [(spec, given) for spec in specs]),
        catalog(Side.INFERENCE, [2, 3], [(spec, wanted) for spec in specs]),
    )


def seconds(simulate, topology=PAIRS, constants=IDEAL, **layouts):
    found = simulate(*sides(**layouts), topology, constants)
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert tuple(found.phases) == PHASES
    assert all(0 <= level <= 1 for series in found.timeline.series for level in series.busy)
    return found.seconds


def test_gather_stays_in_the_domain_and_broadcast_leaves_through_its_nics():
    # Gather: half a tensor over fast links. Broadcast: all of it through two NICs, which is slower than handing
    # the other half on inside the receiving domain.
    assert seconds(simulate_gather_broadcast) == pytest.approx(SIZE / 2 / 2 + SIZE / (2 * 0.5))


def test_gather_and_broadcast_without_domains_go_through_one_nic_each():
    assert seconds(simulate_gather_broadcast, ALONE) == pytest.approx(SIZE / 2 / 0.5 + SIZE / 0.5)


def test_gather_of_what_every_trainer_holds_is_free():
    assert seconds(simulate_gather_broadcast, ALONE, source="R") == pytest.approx(SIZE / 0.5)


def test_broadcast_is_as_slow_as_the_weakest_domain_on_its_way():
    topology = replace(PAIRS, domains=((0, 1), (2,), (3,)))
    assert seconds(simulate_gather_broadcast, topology) == pytest.approx(SIZE / 2 / 2 + SIZE / 0.5)


def test_inside_one_domain_nothing_needs_a_nic():
    topology = replace(PAIRS, domains=((0, 1, 2, 3),))
    assert seconds(simulate_gather_broadcast, topology) == pytest.approx(SIZE / 2 / 2 + SIZE / 2)
    assert seconds(simulate_published, topology) == pytest.approx(SIZE / 2 / 2)
    assert seconds(simulate_point_to_point, topology) == pytest.approx(SIZE / 2 / 2)


def test_gather_and_broadcast_prepares_tensors_one_by_one():
    constants = replace(IDEAL, tensor_s=3.0, refit_s=10.0)
    extra = seconds(simulate_gather_broadcast, constants=constants, names=(GATE, ATTENTION)) - seconds(
        simulate_gather_broadcast, names=(GATE, ATTENTION)
    )
    assert extra == pytest.approx(2 * 3 + 10)


def test_a_shared_nic_halves_what_a_domain_can_broadcast():
    topology = replace(PAIRS, ranks_per_nic=2)
    assert seconds(simulate_gather_broadcast, topology) == pytest.approx(SIZE / 2 / 2 + SIZE / 0.5)


def test_published_sends_every_shard_once():
    assert seconds(simulate_published) == pytest.approx(SIZE / 2 / 0.5)


def test_published_replicas_of_a_domain_share_the_network_and_complete_each_other():
    # Each engine rank brings in one half and gets the other over fast links, which is faster and hides.
    assert seconds(simulate_published, target="R") == pytest.approx(SIZE / 2 / 0.5)


def test_published_replicas_in_domains_of_their_own_bring_in_everything_each():
    # Relays from engine to engine: the trainers still send each shard once.
    assert seconds(simulate_published, ALONE, target="R") == pytest.approx(SIZE / 0.5)


def test_published_stages_pieces_and_copies_before_it_moves_bytes():
    constants = replace(IDEAL, piece_s=3.0, copy_bytes_per_s=SIZE / 8, refit_s=10.0)
    # The busiest rank stages half a tensor.
    assert seconds(simulate_published, constants=constants) == pytest.approx(10 + 3 + 4 + SIZE / 2 / 0.5)


def test_published_broadcasts_the_rest_after_the_bulk():
    found = simulate_published(*sides(names=(GATE, ATTENTION)), PAIRS, IDEAL)
    rest_s = simulate_gather_broadcast(*sides(names=(ATTENTION,)), PAIRS, IDEAL).seconds
    assert found.phases["leftover"] == pytest.approx(rest_s)
    assert found.seconds == pytest.approx(SIZE / 2 / 0.5 + rest_s)


def test_point_to_point_sends_every_replica_its_own_copy():
    # Both ranks of the domain bring in the whole tensor; each trainer sends its half twice.
    assert seconds(simulate_point_to_point, target="R") == pytest.approx(SIZE / 0.5)
    assert seconds(simulate_point_to_point) == pytest.approx(SIZE / 2 / 0.5)


def test_point_to_point_replicas_of_a_shard_share_its_sending():
    assert seconds(simulate_point_to_point, source="R", target="S(0)") == pytest.approx(SIZE / 2 / 0.5)


def experts(num_layers=2, num_experts=4):
    """Trainers 0-3: layer 0 on 0 and 1, layer 1 on 2 and 3, two experts each; engine ranks 4 and 5 by columns."""
    given, wanted = [], []
    whole = [Region.whole(SHAPE)]
    columns = layout(SHAPE, [2], "S(1)", [4, 5])
    for layer in range(num_layers):
        for expert in range(num_experts):
            spec = TensorSpec(f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", SHAPE, "float32")
            given.append((spec, TensorLayout.from_regions(SHAPE, {2 * layer + expert // 2: whole})))
            wanted.append((spec, columns))
    return catalog(Side.TRAINER, range(4), given), catalog(Side.INFERENCE, [4, 5], wanted)


def test_experts_of_a_projection_are_one_call_and_layers_with_a_common_trainer_one_stage():
    source, _ = experts()
    assert call_of("model.layers.1.mlp.experts.3.up_proj.weight") == "model.layers.1.mlp.experts.up_proj.weight"
    assert call_of("model.layers.1.mlp.experts.gate_up_proj") == "model.layers.1.mlp.experts.gate_up_proj"
    assert [len(stage) for stage in stages_of(source.specs, source)] == [4, 4]


def test_two_stages_send_at_once_and_one_stream_has_only_one_stages_trainers():
    source, target = experts()
    topology = replace(PAIRS, domains=((0, 1, 2, 3), (4, 5)))
    # Every trainer sends 2 tensors; the engine ranks receive 4 in all, through their own NICs.
    both = simulate_published(source, target, topology, IDEAL)
    assert both.seconds == pytest.approx(4 * SIZE / 0.5)
    wide = replace(topology, domains=((0, 1, 2, 3), (4, 5)), ranks_per_nic=1)
    one = simulate_published(source, target, wide, replace(IDEAL, piece_s=SIZE / 4), num_streams=1)
    # Alone a stage prepares 2 pieces and sends 2 tensors from each trainer; the other stage's come after it.
    assert one.seconds == pytest.approx(2 * (2 * SIZE / 4 + 2 * SIZE / 0.5))
    both = simulate_published(source, target, wide, replace(IDEAL, piece_s=SIZE / 4))
    # Together the pieces of one hide behind the bytes of the other: the engines' NICs never rest.
    assert both.seconds == pytest.approx(4 * SIZE / 0.5)


def test_there_are_at_most_six_constants_and_each_is_explained():
    names = [field.name for field in fields(Constants)]
    assert len(names) <= 6
    assert all(f"`{name}`" in Constants.__doc__ for name in names)
    assert all(getattr(FITTED, name) > 0 for name in names)
