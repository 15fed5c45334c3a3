"""RankSession's states: what may be called when, what a failure leaves, and that everything in and out is JSON."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from equipment.refit_worlds import ThreadWorld, mesh_layout, planned_ranks

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank
from nemo_rl_reshard.errors import HandshakeError, PlanError, StateError
from nemo_rl_reshard.runtime.assignment import Assignment
from nemo_rl_reshard.runtime.one_process import LoopbackMeeting
from nemo_rl_reshard.runtime.order import RefitOrder
from nemo_rl_reshard.runtime.report import RankReport
from nemo_rl_reshard.runtime.session import RankSession, SessionState
from nemo_rl_reshard.runtime.world import World

ORDER = {"version": 1, "deadline_s": 5.0}


def two_to_three() -> tuple[ExplicitRank, ...]:
    return planned_ranks(
        [("w", mesh_layout((7, 3), (2,), range(2), "S(0)"), "float32")],
        [("w", mesh_layout((7, 3), (3,), range(2, 5), "S(0)"), "float32")],
        num_trainers=2,
        num_targets=3,
    )


@pytest.fixture
def lonely() -> LiveRank:
    """Rank 0 of five, which has declared and no more."""
    return LiveRank(two_to_three()[0], LoopbackMeeting().join)


def test_the_order_of_a_life(lonely: LiveRank) -> None:
    session = lonely.session
    assert session.state is SessionState.DECLARED
    session.adopt(lonely.made_of.handout)
    assert session.state is SessionState.PLANNED
    session.connect(LoopbackMeeting().worlds(2, 5)[0])
    assert session.state is SessionState.READY
    session.declare()
    assert session.state is SessionState.DECLARED
    session.adopt(lonely.made_of.handout)
    assert session.state is SessionState.READY
    session.close()
    session.close()
    assert session.state is SessionState.CLOSED


@pytest.mark.parametrize(
    ("call", "argument"), [("connect", {}), ("adopt", {}), ("refit", ORDER)], ids=["connect", "adopt", "refit"]
)
def test_a_new_session_only_declares(lonely: LiveRank, call: str, argument: dict[str, Any]) -> None:
    session = RankSession(3, source=lonely.source)
    with pytest.raises(StateError, match=f"{call}: rank 3 is new; it may be called when"):
        getattr(session, call)(argument)


@pytest.mark.parametrize("call", ["declare", "connect", "adopt", "refit"])
def test_a_closed_session_does_nothing(lonely: LiveRank, call: str) -> None:
    lonely.session.close()
    with pytest.raises(StateError, match="is closed"):
        getattr(lonely.session, call)(None)


def test_a_refit_needs_a_plan_and_a_world(lonely: LiveRank) -> None:
    with pytest.raises(StateError, match="refit: rank 0 is declared"):
        lonely.session.refit(ORDER)
    lonely.session.adopt(lonely.made_of.handout)
    with pytest.raises(StateError, match="refit: rank 0 is planned"):
        lonely.session.refit(ORDER)


def test_a_failure_stays_until_a_newer_world_is_joined() -> None:
    """`B61`: the error of a later call repeats the first cause."""
    with ThreadWorld(two_to_three()) as world:
        world.live[3].target.load = None  # not needed here: the tensor goes direct
        real = world.live[3].target.finish
        world.live[3].target.finish = lambda version: (_ for _ in ()).throw(RuntimeError("full disk"))
        world.outcomes(1)
        session = world.sessions[3]
        assert session.state is SessionState.FAILED
        for call in (session.refit, session.adopt):
            with pytest.raises(StateError, match="is failed since full disk"):
                call({})
        with pytest.raises(HandshakeError, match="generation 1: 1 is old"):
            session.connect({**world.plain_worlds()[3], "generation": 1})
        world.live[3].target.finish = real
        world.rebuild()
        assert session.first_cause is None
        world.refit(2)


def test_a_world_of_another_rank_is_refused(lonely: LiveRank) -> None:
    with pytest.raises(HandshakeError, match="rank 0 was told that it is rank 1"):
        lonely.session.connect(LoopbackMeeting().worlds(2, 5)[1])


def test_a_handout_of_another_rank_is_refused(lonely: LiveRank) -> None:
    with pytest.raises(PlanError, match="rank 0 was given the handout of rank 1"):
        lonely.session.adopt(two_to_three()[1].handout)


@pytest.mark.parametrize("broken", [{}, {"rank": 0}, {"rank": 7, "size": 5}])
def test_a_malformed_world_is_refused(broken: dict[str, Any]) -> None:
    whole = LoopbackMeeting().worlds(2, 5)[0]
    with pytest.raises(HandshakeError, match=r"malformed world|in a world of"):
        World.from_plain({**whole, **broken} if "size" in broken else broken)


def test_a_malformed_order_leaves_the_session_ready() -> None:
    with ThreadWorld(two_to_three()) as world:
        with pytest.raises(HandshakeError, match="malformed refit order"):
            world.sessions[0].refit({"version": 1})
        with pytest.raises(HandshakeError, match="malformed refit order"):
            world.sessions[0].refit({**ORDER, "verify": "perhaps"})
        world.refit(1)


def test_everything_in_and_out_survives_json() -> None:
    """`B70`: no torch type, tuple or object; what comes out of JSON is what went in."""
    with ThreadWorld(two_to_three()) as world:
        reports = world.refit(1)
        rank = world.live[2]
        specs = [[spec.name, list(spec.shape), spec.dtype] for spec in rank.made_of.source_specs]
        plain = [
            reports[2],
            rank.session.declare(json.loads(json.dumps(specs))),
            rank.made_of.handout,
            RefitOrder.from_plain(ORDER).to_plain(),
        ]
        for value in plain:
            assert json.loads(json.dumps(value)) == value
        assert Assignment.from_plain(json.loads(json.dumps(plain[2])), 2) == rank.made_of.assignment
        assert RankReport.from_plain(json.loads(json.dumps(reports[2]))).to_plain() == reports[2]


def test_one_lifecycle_for_every_rank() -> None:
    """`B67`: five calls, one plain argument each, the same for trainers, engines, backends, sync and async holders."""
    calls = {
        name: list(inspect.signature(call).parameters)[1:]
        for name, call in inspect.getmembers(RankSession, inspect.isfunction)
        if not name.startswith("_")
    }
    assert calls == {
        "declare": ["specs"],
        "connect": ["world"],
        "adopt": ["handout"],
        "refit": ["order"],
        "close": [],
    }


def test_a_rank_needs_an_end() -> None:
    with pytest.raises(ValueError, match="rank 2 needs a source, a target or both"):
        RankSession(2)


def test_each_side_declares_its_own_way(lonely: LiveRank) -> None:
    with pytest.raises(StateError, match="trainer rank 0 takes no specs"):
        lonely.session.declare([["w", [7, 3], "float32"]])
    engine = LiveRank(two_to_three()[3], LoopbackMeeting().join)
    with pytest.raises(StateError, match="inference rank 3 needs the trainers' specs"):
        engine.session.declare()
