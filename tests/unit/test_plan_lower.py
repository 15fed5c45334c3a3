"""Programs: bounded messages, one order for all ranks, the same message at both ends."""

from dataclasses import replace

import pytest
from equipment.declaring import GATE, layout, one_tensor, refit, rows
from equipment.plan_runs import assert_delivered, finishes

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_programs
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.topology import Topology


def programs(found):
    return [lower(found.plan, rank) for rank in found.ranks]


def test_b39_a_tensor_larger_than_the_buffer_is_cut_and_the_others_travel_whole():
    sizes = (16, 100, 16)  # bytes, buffer of 64
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (size,), "int8") for i, size in enumerate(sizes)]
    tensors = [(s, layout(s.shape, (1,), "R", (0,)), layout(s.shape, (1,), "R", (1,))) for s in specs]
    found = refit(tensors, (0,), (1,), options=PlanOptions(bucket_bytes=64))
    messages = lower(found.plan, 1).messages
    parts = [part for message in messages for part in message.parts]
    assert {spec.name: sum(part.nbytes for part in parts if part.tensor == spec.name) for spec in specs} == {
        spec.name: size for spec, size in zip(specs, sizes, strict=True)
    }
    assert [part.tensor for part in parts].count(specs[1].name) >= 2
    assert all(message.nbytes <= 64 for message in messages)
    assert_delivered(found)


def test_b38_both_ends_compute_the_same_messages_and_other_limits_are_noticed():
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (40,), "int8") for i in range(3)]
    tensors = [(s, layout(s.shape, (1,), "R", (0,)), layout(s.shape, (1,), "R", (1,))) for s in specs]
    sender = refit(tensors, (0,), (1,), options=PlanOptions(bucket_bytes=100))
    receiver = refit(tensors, (0,), (1,), options=PlanOptions(bucket_bytes=60))
    check_programs([lower(sender.plan, 0), lower(sender.plan, 1)])
    with pytest.raises(PlanError, match="programs come from different plans"):
        check_programs([lower(sender.plan, 0), lower(receiver.plan, 1)])


def test_b09_three_sends_and_two_receives_are_an_error():
    options = PlanOptions(message_bytes=8)
    found = one_tensor((3, 2), ((1,), "R", (0,)), ((1,), "R", (1,)), options=options)
    one, two = programs(found)
    assert len(one.messages) == 3
    with pytest.raises(PlanError, match=r"known, with its content, to ranks \[0\] only"):
        check_programs([one, replace(two, messages=two.messages[:2])])


def test_small_parts_of_one_pair_share_a_message():
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (2, 2), "float32") for i in range(10)]
    given, wanted = layout((2, 2), (2,), "S(0)", (0, 1)), layout((2, 2), (1,), "R", (2,))
    found = refit([(spec, given, wanted) for spec in specs], (0, 1), (2,), options=PlanOptions(message_bytes=40))
    messages = lower(found.plan, 0).messages
    assert [len(message.parts) for message in messages] == [5, 5]
    assert [part.tensor for message in messages for part in message.parts] == [spec.name for spec in specs]


def test_large_regions_are_cut_along_rows():
    options = PlanOptions(message_bytes=100)
    found = one_tensor((10, 5), ((1,), "R", (0,)), ((1,), "R", (1,)), options=options)
    assert [message.parts[0].region.extent for message in lower(found.plan, 0).messages] == [(5, 5), (5, 5)]
    found = one_tensor((2, 60), ((1,), "R", (0,)), ((1,), "R", (1,)), options=options)
    assert all(message.nbytes <= 100 for message in lower(found.plan, 0).messages)
    assert {message.parts[0].region.extent for message in lower(found.plan, 0).messages} == {(1, 20)}


def test_all_pairs_are_busy_from_the_first_messages_on():
    options = PlanOptions(message_bytes=64)
    found = one_tensor((16, 16), ((2,), "S(0)", (0, 1)), ((2,), "S(1)", (2, 3)), options=options)
    firsts = sorted((message for program in programs(found) for message in program.messages), key=lambda m: m.order)
    pairs = [(message.src, message.dst) for message in firsts[:8:2]]  # every message is in two programs
    assert sorted(pairs) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_a_forward_comes_after_its_receive_in_the_order():
    topology = Topology(domains=((0,), (1, 2, 3)))
    found = one_tensor((6, 2), ((1,), "R", (0,)), ((3,), "R", (1, 2, 3)), topology, PlanOptions(message_bytes=8))
    for program in programs(found):
        came = {}
        for message in program.messages:
            for part in message.parts:
                if message.dst == program.rank:
                    came[part.region] = message.order
                elif message.src != 0:
                    assert came[part.region] < message.order
    assert_delivered(found)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_bounded_windows_never_deadlock(window):
    topology = Topology(domains=((0, 1, 2), (3, 4, 5, 6), (7, 8)))
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (9, 4), "float32") for i in range(4)]
    given = layout((9, 4), (3,), "S(0)", range(3))
    wanted = layout((9, 4), (3, 2), "R S(1)", range(3, 9))
    options = PlanOptions(bucket_bytes=64, message_bytes=16)
    found = refit([(spec, given, wanted) for spec in specs], range(3), range(3, 9), topology, options)
    assert finishes(programs(found), window)


def test_the_window_game_does_find_deadlocks():
    found = one_tensor((4, 2), ((2,), "S(0)", (0, 1)), ((2,), "S(1)", (2, 3)))
    played = programs(found)
    crossed = [replace(p, messages=p.messages[::-1]) if p.rank in (1, 3) else p for p in played]
    assert finishes(played, 1)
    assert not finishes(crossed, 1)


def test_a_rank_outside_the_plan_is_refused():
    found = one_tensor((4, 2), ((1,), "R", (0,)), ((1,), "R", (1,)))
    with pytest.raises(PlanError, match="rank 2 is in neither side"):
        lower(found.plan, 2)


def test_an_idle_rank_gets_an_empty_program():
    spec = TensorSpec(GATE, (2, 1), "float32")
    found = refit([(spec, rows((2, 1), {0: [(0, 2)]}), rows((2, 1), {2: [(0, 2)]}))], (0, 1), (2, 3))
    assert lower(found.plan, 1).messages == ()
    assert lower(found.plan, 3).messages == ()
