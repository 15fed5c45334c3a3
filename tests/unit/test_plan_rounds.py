"""Rounds: cut at steps and at the busiest rank, alike for all ranks, and never too large to be started as one. B68."""

from __future__ import annotations

import pytest
from equipment.nccl_semantics import NcclHub
from equipment.nccl_worlds import NcclLikeWorld
from equipment.refit_worlds import MLP, mesh_layout, planned_ranks

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.rounds import LARGEST_ROUND_BYTES, RoundLimits, round_of, round_starts
from nemo_rl_reshard.plan.transfer import Message, RankProgram
from nemo_rl_reshard.topology import Link

MIB = 1 << 20


def programs(*moves: tuple[int, int, int, int]) -> list[RankProgram]:
    """Of every rank, from messages given as (order, step, source, receiver)."""
    messages = [Message(order, step, src, dst, Link.NETWORK, ()) for order, step, src, dst in moves]
    return [
        RankProgram(rank, "", tuple(m for m in messages if rank in (m.src, m.dst)), (), 8)
        for rank in sorted({rank for message in messages for rank in (message.src, message.dst)})
    ]


def test_the_busiest_rank_ends_a_round_and_so_does_a_step() -> None:
    sending = programs((1, 0, 0, 2), (2, 0, 0, 3), (4, 0, 0, 2), (5, 0, 1, 3), (9, 1, 1, 2))
    assert round_starts(sending, 2) == (1, 4, 9)
    assert round_starts(sending, 1) == (1, 2, 4, 9)
    assert round_starts(sending, 9) == (1, 9)
    receiving = programs((1, 0, 0, 3), (2, 0, 1, 3), (3, 0, 2, 3), (4, 0, 2, 0))
    assert round_starts(receiving, 2) == (1, 3)


def test_local_copies_count_as_nothing() -> None:
    assert round_starts(programs((1, 0, 0, 0), (2, 0, 0, 1), (3, 1, 1, 1)), 1) == (2,)
    assert round_starts([], 4) == ()


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
    )
    with pytest.raises(PlanError, match="message_bytes 4294967296 is more than 4294967295"):
        NcclLikeWorld(ranks, NcclHub(2))
