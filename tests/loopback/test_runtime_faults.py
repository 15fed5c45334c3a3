"""What happens when a rank fails inside a refit: who raises what, how soon, and that the next refit is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from equipment.faulty_transport import Delay, FaultyTransport, Raise, Stall
from equipment.refit_worlds import MLP, NORM, ThreadWorld, mesh_layout, mixed_ranks, planned_ranks

from nemo_rl_reshard.errors import (
    HandshakeError,
    RefitAbortedError,
    StateError,
    TargetError,
    TransportError,
    TransportTimeoutError,
)
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime.leftover_plan import Gather
from nemo_rl_reshard.runtime.one_process import together
from nemo_rl_reshard.runtime.session import SessionState

OVER = pytest.mark.parametrize("over", ["loopback", "gloo"])


def nine_ranks(options: PlanOptions | None = None) -> Any:
    """Three trainers, 2 x 3 inference ranks."""
    return mixed_ranks(num_trainers=3, engines=(2, 3), mlp_shape=(9, 8), norm_shape=(7,), options=options)


def fail_once(where: Any, call: str, nth: int = 0) -> None:
    """Make the n-th next call of `where.call` raise, and every later one work again."""
    real: Callable[..., Any] = getattr(where, call)
    left = [nth]

    def raising(*arguments: Any) -> Any:
        if left[0] == 0:
            setattr(where, call, real)
            raise RuntimeError(f"{call} broke")
        left[0] -= 1
        return real(*arguments)

    setattr(where, call, raising)


@OVER
@pytest.mark.parametrize(
    ("rank", "end", "call", "nth"),
    [
        (1, "source", "view", 0),
        (1, "source", "view", 3),
        (4, "target", "begin", 0),
        (4, "target", "view", 2),
        (8, "target", "tensor_done", 0),
        (5, "target", "load", 0),
        (3, "target", "finish", 0),
    ],
)
def test_one_raise_is_one_first_cause_and_the_next_refit_is_right(
    over: str, rank: int, end: str, call: str, nth: int
) -> None:
    """`B61`, `B62`, `B63`: the others are called off within a second; nothing is published; nothing stays half open."""
    with ThreadWorld(nine_ranks(), over=over) as world:
        world.refit(1)
        fail_once(getattr(world.live[rank], end), call, nth)
        start_s = time.monotonic()
        outcomes = world.outcomes(2)
        assert time.monotonic() - start_s < 4  # of a deadline of 10 s; a second where nothing else runs
        assert isinstance(outcomes[rank], RuntimeError)
        assert str(outcomes[rank]) == f"{call} broke"
        others = {other: outcome for other, outcome in outcomes.items() if other != rank}
        assert {type(outcome) for outcome in others.values()} == {RefitAbortedError}
        assert all(f"{call} broke" in str(outcome) and f"rank {rank}" in str(outcome) for outcome in others.values())
        for session in world.sessions.values():
            assert session.version is None
            assert session.state is SessionState.FAILED
        assert world.sessions[rank].first_cause is outcomes[rank]
        # A rank that had not begun when it was called off still has the old weights; none has the new version.
        assert {each.target.version for each in world.live.values() if each.target is not None} <= {1, None}
        for other, each in world.live.items():
            opened = each.target is not None and not each.target.is_usable
            assert world.sessions[other].may_be_mixed == opened, other
        world.rebuild()
        world.refit(3)
        assert not any(session.may_be_mixed for session in world.sessions.values())
        world.refit(4)


@OVER
def test_a_transport_that_breaks_on_one_rank(over: str) -> None:
    with ThreadWorld(nine_ranks(), over=over) as world:
        world.wrap[6] = lambda inner: FaultyTransport(inner, {2: Raise("cable pulled")})
        world.rebuild()
        outcomes = world.outcomes(1)
        assert isinstance(outcomes[6], TransportError)
        assert {type(outcomes[rank]) for rank in outcomes if rank != 6} == {RefitAbortedError}
        world.rebuild()
        world.refit(2)


@OVER
def test_a_slow_rank_is_waited_for(over: str) -> None:
    """`B60`: a receiver that is late at every operation stalls nobody for good, whatever its peers wait in."""
    with ThreadWorld(nine_ranks(), over=over) as world:
        for rank in (2, 7):
            world.wrap[rank] = lambda inner: FaultyTransport(inner, {index: Delay(0.01) for index in range(40)})
        world.rebuild()
        world.refit(1)
        world.refit(2)


@OVER
@pytest.mark.parametrize("gather", [None, Gather.EVERYWHERE])
def test_leftovers_go_on_while_a_loader_is_slow(over: str, gather: Gather | None) -> None:
    """`B60`: many leftover batches, one engine that takes its time for each."""
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(6)]
    ranks = planned_ranks(
        [(name, mesh_layout((7,), (2,), range(2), "S(0)"), "float32") for name in names],
        [(name, mesh_layout((7,), (3,), range(2, 5), "R"), "float32") for name in names],
        num_trainers=2,
        num_targets=3,
        policy=RoutePolicy.FFN,
        options=PlanOptions(bucket_bytes=128, message_bytes=16),
        gather=gather,
    )
    with ThreadWorld(ranks, over=over) as world:
        target = world.live[3].target
        load = target.load

        def slow_load(named: Any) -> None:
            threading.Event().wait(0.05)
            load(named)

        target.load = slow_load
        world.refit(1)
        world.refit(2)
        assert sorted(target.loaded) == names


@OVER
def test_a_rank_that_hangs_costs_the_deadline_and_no_more(over: str) -> None:
    with ThreadWorld(nine_ranks(), over=over) as world:
        stall = Stall()
        world.wrap[4] = lambda inner: FaultyTransport(inner, {3: stall})
        world.rebuild()
        left = threading.Semaphore(0)

        def refit(rank: int) -> Any:
            try:
                return world.sessions[rank].refit({"version": 1, "deadline_s": 1.0})
            finally:
                left.release()

        def release() -> None:
            for _ in range(8):
                left.acquire()
            stall.release.set()

        start_s = time.monotonic()
        outcomes = together({**{rank: partial(refit, rank) for rank in world.live}, 99: release}, 20.0)
        assert time.monotonic() - start_s < 3.0
        others = [outcomes[rank] for rank in world.live if rank != 4]
        assert {type(outcome) for outcome in others} <= {TransportTimeoutError, RefitAbortedError}
        assert TransportTimeoutError in {type(outcome) for outcome in others}
        assert isinstance(outcomes[4], TransportError)
        assert all(session.version is None for session in world.sessions.values())
        world.rebuild()
        world.refit(2)


@OVER
def test_a_rank_that_never_comes_is_named(over: str) -> None:
    """`B10`: one rank dropped its plan and takes no part; nobody moves a byte alone."""
    with ThreadWorld(nine_ranks(), over=over) as world:
        world.refit(1)
        world.sessions[1].declare()
        outcomes = world.outcomes(2, deadline_s=0.5)
        assert isinstance(outcomes[1], StateError)
        assert "declared" in str(outcomes[1])
        assert any("ranks [1] did not come" in str(outcome) for outcome in outcomes.values())
        assert all(isinstance(outcomes[rank], TransportError) for rank in outcomes if rank != 1)
        # Nothing was opened, so the engines still serve what they had.
        assert not any(session.may_be_mixed for session in world.sessions.values())
        assert all(each.target.is_usable for each in world.live.values() if each.target is not None)


def test_a_rank_that_takes_its_plan_again_fits_in() -> None:
    """`B10`: caches differ, the agreed digest does not."""
    with ThreadWorld(nine_ranks()) as world:
        world.refit(1)
        world.sessions[1].declare()
        world.sessions[1].adopt(world.live[1].made_of.handout)
        world.refit(2)


@OVER
@pytest.mark.parametrize(
    ("options", "field"),
    [(PlanOptions(bucket_bytes=128, message_bytes=16), "bucket_bytes"), (PlanOptions(64, 32), "message_bytes")],
)
def test_unequal_sizes_are_refused_before_a_byte_moves(over: str, options: PlanOptions, field: str) -> None:
    """`B16`, `B38`: the error names the field, and which ranks say what."""
    other = nine_ranks(options)
    with ThreadWorld(nine_ranks(), over=over) as world:
        world.refit(1)
        held = {rank: each.target.shards[MLP][0][1].clone() for rank, each in world.live.items() if each.target}
        world.sessions[5].adopt(other[5].handout)
        for each in world.live.values():
            if each.source is not None:
                each.fill(2)
        outcomes = world.outcomes(2)
        assert {type(outcome) for outcome in outcomes.values()} == {HandshakeError}
        assert f"{field}: ranks [0, 1, 2, 3, 4, 6, 7, 8] say" in str(outcomes[0])
        assert "ranks [5] say" in str(outcomes[0])
        assert "plan_digest" in str(outcomes[0])
        for rank, values in held.items():
            assert world.live[rank].target.shards[MLP][0][1].equal(values)


def test_a_world_of_one_cannot_pretend_to_succeed() -> None:
    """`B16`: a receiver that sits in a world of its own is refused before it can load what was never sent."""
    ranks = nine_ranks()
    with ThreadWorld(ranks) as world:
        lonely = {**world.plain_worlds()[0], "size": 1, "num_trainers": 1}
        world.sessions[0].connect(lonely)
        with pytest.raises(HandshakeError, match=r"world of 1 .* plan for 9 ranks"):
            world.sessions[0].adopt(ranks[0].handout)


def test_orders_that_differ_are_refused() -> None:
    with ThreadWorld(nine_ranks()) as world:
        calls = {
            rank: partial(session.refit, {"version": 1 + (rank == 8), "deadline_s": 5.0})
            for rank, session in world.sessions.items()
        }
        outcomes = together(calls, 20.0)
        assert {type(outcome) for outcome in outcomes.values()} == {HandshakeError}
        assert "version: ranks [0, 1, 2, 3, 4, 5, 6, 7] say 1; ranks [8] say 2" in str(outcomes[3])


def test_a_loader_that_was_left_out_is_an_error() -> None:
    """`B52`, `B54`: every element is written exactly once a refit, or the refit failed."""
    with ThreadWorld(nine_ranks()) as world:
        world.live[7].target.load = lambda named: None
        outcomes = world.outcomes(1)
        assert isinstance(outcomes[7], TargetError)
        assert NORM in str(outcomes[7])
