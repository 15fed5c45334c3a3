"""Rounds: cut at steps and at the busiest rank, alike for all ranks, and never too large to be started as one. B68."""

from __future__ import annotations

from dataclasses import replace

import pytest
from equipment.nccl_semantics import NcclHub
from equipment.nccl_worlds import NcclLikeWorld
from equipment.refit_worlds import MLP, mesh_layout, mixed_ranks, planned_ranks

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.lower import order_of
from nemo_rl_reshard.plan.plan import Move, Placed, Plan, PlanOptions, Template
from nemo_rl_reshard.plan.rounds import LARGEST_ROUND_BYTES, RoundLimits, round_of, round_starts
from nemo_rl_reshard.topology import Link

MIB = 1 << 20


WORLD = 4


def plan_of(*moves: tuple[int, int, int]) -> Plan:
    """Of messages given as (step, source, receiver); each is a tensor of its own."""
    crews = tuple((src,) if src == dst else (src, dst) for _, src, dst in moves)
    whole = (Region((0,), (8,)),)
    local, sent = ((Move(0, 0, receiver, link, 0),) for receiver, link in ((0, Link.LOCAL), (1, Link.NETWORK)))
    return Plan(
        options=PlanOptions(8, 8),
        specs={f"w{number}": TensorSpec(f"w{number}", (8,), "uint8") for number in range(len(moves))},
        templates=(Template((8,), 1, whole, (local, sent)),),
        crews=crews,
        placed=tuple(
            Placed(f"w{number}", 0, int(src != dst), number, step) for number, (step, src, dst) in enumerate(moves)
        ),
        leftovers=(),
        skipped={},
        sources=tuple(range(WORLD)),
        targets=tuple(range(WORLD)),
    )


def at(step: int, turn: int, src: int, dst: int) -> int:
    return order_of(step, turn, src, dst, WORLD)


def test_the_busiest_rank_ends_a_round_and_so_does_a_step() -> None:
    sending = plan_of((0, 0, 2), (0, 0, 3), (0, 0, 2), (0, 1, 3), (1, 1, 2))
    last = at(1, 0, 1, 2)
    assert round_starts(sending, 2) == (at(0, 0, 0, 2), at(0, 1, 0, 2), last)
    assert round_starts(sending, 1) == (at(0, 0, 0, 2), at(0, 0, 0, 3), at(0, 1, 0, 2), last)
    assert round_starts(sending, 9) == (at(0, 0, 0, 2), last)
    receiving = plan_of((0, 0, 3), (0, 1, 3), (0, 2, 3), (0, 2, 0))
    assert round_starts(receiving, 2) == (at(0, 0, 2, 3), at(0, 0, 0, 3))


def test_local_copies_count_as_nothing() -> None:
    assert round_starts(plan_of((0, 0, 0), (0, 0, 1), (1, 1, 1)), 1) == (at(0, 0, 0, 1),)
    assert round_starts(plan_of((0, 1, 1)), 1) == ()
    assert round_starts(plan_of(), 4) == ()


def test_messages_are_counted_as_they_are_packed() -> None:
    """Parts of 8 bytes, three of which fit a message: five of one pair are two messages, not five or one."""
    plan = plan_of(*[(0, 0, 1)] * 5)
    assert len(round_starts(replace(plan, options=PlanOptions(24, 24)), 1)) == 2
    assert len(round_starts(plan, 1)) == 5


def test_a_plan_of_more_messages_than_can_be_numbered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_rl_reshard.plan.message_counts.PER_PAIR", 4)
    assert len(round_starts(plan_of(*[(0, 0, 1)] * 4), 1)) == 4
    with pytest.raises(PlanError, match="raise message_bytes"):
        round_starts(plan_of(*[(0, 0, 1)] * 5), 1)


def test_a_message_is_in_the_round_that_began_last() -> None:
    assert [round_of(order, (1, 4, 9)) for order in (0, 1, 3, 4, 8, 9, 99)] == [-1, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("in_flight", "bucket_bytes", "message_bytes", "limits"),
    [
        (16, 64 * MIB, 4 * MIB, RoundLimits(8, 2)),
        (1, 64 * MIB, 4 * MIB, RoundLimits(1, 1)),
        (3, 64 * MIB, 4 * MIB, RoundLimits(1, 2)),
        (16, 4 * MIB, 4 * MIB, RoundLimits(1, 1)),
        (16, 12 * MIB, 4 * MIB, RoundLimits(1, 2)),
        (1024, 1 << 40, 1 << 30, RoundLimits(3, 2)),
    ],
)
def test_b68_limits_follow_from_sizes_on_which_all_ranks_agree(in_flight, bucket_bytes, message_bytes, limits) -> None:
    found = RoundLimits.of(in_flight=in_flight, bucket_bytes=bucket_bytes, message_bytes=message_bytes)
    assert found == limits
    assert found.messages * message_bytes <= LARGEST_ROUND_BYTES


def test_b68_a_message_too_large_for_a_round_is_refused_before_anything_is_allocated() -> None:
    ranks = planned_ranks(
        [(MLP, mesh_layout((4, 4), (1,), [0], "R"), "float32")],
        [(MLP, mesh_layout((4, 4), (1,), [1], "R"), "float32")],
        num_trainers=1,
        num_targets=1,
        options=PlanOptions(bucket_bytes=1 << 33, message_bytes=1 << 32),
        in_rounds=True,
    )
    with pytest.raises(PlanError, match="message_bytes 4294967296 is more than 4294967295"):
        NcclLikeWorld(ranks, NcclHub(2))


def test_a_world_that_needs_rounds_is_not_made_ready_without() -> None:
    with pytest.raises(PlanError, match=r"rank 0: this transport goes in rounds .* hand_out with in_rounds=True"):
        NcclLikeWorld(mixed_ranks(), NcclHub(6))
