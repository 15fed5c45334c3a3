"""The published worked examples, and small plans whose right answer is known."""

from collections import Counter

from equipment.declaring import GATE, one_tensor, refit, rows
from equipment.plan_runs import assert_delivered

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.topology import Link, Topology


def prove(found):
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    assert_delivered(found, version=1)
    assert_delivered(found, version=2)


def test_rows_over_2_to_columns_over_4_is_8_transfers_of_4_by_2():
    found = one_tensor((8, 8), ((2, 1), "S(0) R", (0, 1)), ((4,), "S(1)", (2, 3, 4, 5)))
    transfers = list(found.plan.transfers())
    assert len(transfers) == 8
    assert {transfer.region.extent for transfer in transfers} == {(4, 2)}
    assert {(transfer.src, transfer.dst) for transfer in transfers} == {(s, d) for s in (0, 1) for d in (2, 3, 4, 5)}
    assert {transfer.link for transfer in transfers} == {Link.NETWORK}
    prove(found)


def test_tp4_to_tp2_dp2_in_one_domain_sends_each_source_shard_once_over_the_network():
    topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))
    found = one_tensor((8, 8), ((4,), "S(0)", range(4)), ((2, 2), "R S(0)", (4, 5, 6, 7)), topology)
    links = Counter(transfer.link for transfer in found.plan.transfers())
    assert links == {Link.NETWORK: 4, Link.FAST: 4}
    network = [transfer for transfer in found.plan.transfers() if transfer.link is Link.NETWORK]
    assert sorted(transfer.src for transfer in network) == [0, 1, 2, 3]
    assert sorted(transfer.dst for transfer in network) == [4, 5, 6, 7]
    assert {transfer.region.extent for transfer in network} == {(2, 8)}
    assert {transfer.step for transfer in network} == {0}
    assert {transfer.step for transfer in found.plan.transfers() if transfer.link is Link.FAST} == {1}
    prove(found)


def test_tp4_to_tp2_dp2_is_four_shards_of_network_bytes_also_when_shards_are_large():
    topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))
    found = one_tensor((4096, 4096), ((4,), "S(0)", range(4)), ((2, 2), "R S(0)", (4, 5, 6, 7)), topology)
    assert Counter(transfer.link for transfer in found.plan.transfers()) == {Link.NETWORK: 4, Link.FAST: 4}


def test_tp4_to_tp2_dp2_without_domains_is_eight_network_transfers():
    found = one_tensor((8, 8), ((4,), "S(0)", range(4)), ((2, 2), "R S(0)", (4, 5, 6, 7)))
    assert [transfer.link for transfer in found.plan.transfers()] == [Link.NETWORK] * 8
    prove(found)


def test_b01_fsdp_over_tp_to_tp_takes_the_rows_torch_holds():
    found = one_tensor((10, 1), ((2, 2), "SS(0,2) S(0)", range(4)), ((2,), "S(0)", (4, 5)))
    took = {(t.src, t.dst, t.region.offset[0], t.region.extent[0]) for t in found.plan.transfers()}
    assert took == {(0, 4, 0, 3), (2, 4, 3, 2), (1, 5, 5, 3), (3, 5, 8, 2)}
    prove(found)


def test_b02_the_empty_rank_sends_nothing_and_each_row_comes_once():
    found = one_tensor((7, 1), ((2, 3), "SS(0,3) S(0)", range(6)), ((2,), "S(0)", (6, 7)))
    assert 5 not in {transfer.src for transfer in found.plan.transfers()}
    taken = [row for t in found.plan.transfers() for row in range(t.region.offset[0], t.region.stop[0])]
    assert sorted(taken) == list(range(7))
    prove(found)


def test_b05_source_rectangles_are_the_shards_themselves():
    found = one_tensor((8, 2), ((2,), "S(0)", (0, 1)), ((1,), "R", (2,)))
    assert [transfer.region for transfer in found.plan.transfers()] == [
        Region((0, 0), (4, 2)),
        Region((4, 0), (4, 2)),
    ]


def test_b06_replicas_send_one_copy_and_share_the_work():
    found = one_tensor((5, 2), ((2, 2), "R S(0)", range(4)), ((1,), "R", (4,)))
    sent = Counter()
    for transfer in found.plan.transfers():
        sent[transfer.src] += transfer.region.numel * 4
    assert sum(sent.values()) == 40
    assert sorted(sent.values()) == [16, 24]
    prove(found)


def test_b06_replicas_take_turns_over_several_tensors():
    specs = [TensorSpec(f"model.layers.{index}.mlp.up_proj.weight", (4, 2), "float32") for index in range(6)]
    given = rows((4, 2), {0: [(0, 4)], 1: [(0, 4)], 2: [(0, 4)]})
    found = refit([(spec, given, rows((4, 2), {3: [(0, 4)]})) for spec in specs], range(3), [3])
    assert Counter(transfer.src for transfer in found.plan.transfers()) == {0: 2, 1: 2, 2: 2}
    prove(found)


def test_a_rank_of_both_sides_copies_at_home():
    given, wanted = rows((4, 2), {0: [(0, 2)], 1: [(2, 2)]}), rows((4, 2), {1: [(0, 4)]})
    found = refit([(TensorSpec(GATE, (4, 2), "float32"), given, wanted)], (0, 1), (1,), colocated=True)
    assert {(t.src, t.dst, t.link) for t in found.plan.transfers()} == {(0, 1, Link.NETWORK), (1, 1, Link.LOCAL)}
    prove(found)


def test_sources_inside_the_domain_send_over_fast_links_only():
    topology = Topology(domains=((0, 2, 3), (1, 4)))
    found = one_tensor((4, 2), ((2,), "R", (0, 1)), ((3,), "R", (2, 3, 4)), topology)
    assert {(t.src, t.dst, t.link) for t in found.plan.transfers()} == {
        (0, 2, Link.FAST),
        (0, 3, Link.FAST),
        (1, 4, Link.FAST),
    }
    prove(found)


def test_large_cells_are_shared_by_replicas_and_small_ones_kept_whole():
    topology = Topology(domains=((1, 2),))
    large = one_tensor((2048, 1024), ((1,), "R", (0,)), ((2,), "R", (1, 2)), topology)
    network = [transfer for transfer in large.plan.transfers() if transfer.link is Link.NETWORK]
    assert sorted((t.dst, t.region.extent) for t in network) == [(1, (1024, 1024)), (2, (1024, 1024))]
    small = one_tensor((16, 16), ((1,), "R", (0,)), ((2,), "R", (1, 2)), topology)
    assert Counter(transfer.link for transfer in small.plan.transfers()) == {Link.NETWORK: 1, Link.FAST: 1}
    prove(small)


def test_a_scalar_and_an_empty_tensor():
    found = one_tensor((), ((2,), "R", (0, 1)), ((2,), "R", (2, 3)), dtype="int64")
    assert [(t.region, t.dst) for t in found.plan.transfers()] == [(Region((), ()), 2), (Region((), ()), 3)]
    prove(found)
    empty = one_tensor((0, 4), ((2,), "S(0)", (0, 1)), ((1,), "R", (2,)))
    assert list(empty.plan.transfers()) == []
    prove(empty)
