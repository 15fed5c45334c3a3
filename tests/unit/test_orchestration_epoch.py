"""B15: calls of a world that was left, whenever they run, neither reach a newer world nor take it down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import pytest
from equipment.ray_light import SPECS, rows_of, whole

from nemo_rl_reshard.errors import StateError
from nemo_rl_reshard.orchestration.epoch import EpochFence, next_epoch
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.rank_operations import HeldRank, perform
from nemo_rl_reshard.orchestration.served_ranks import ServedRanks
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.explicit import ExplicitSource
from nemo_rl_reshard.runtime.session import RankSession


def test_epochs_go_up_even_where_the_clock_goes_back() -> None:
    first = next_epoch(0)
    assert first < next_epoch(first) < next_epoch(first + 10**9) == first + 10**9 + 1
    assert next_epoch(0) >= first, "a controller that knows of no other begins after it"


class Holder:
    """Whatever lives as long as a rank."""


def ask(holder: Holder, operation: str, epoch: int, **argument: Any) -> Outcome:
    def source(_: int) -> ExplicitSource:
        return ExplicitSource(
            SPECS, {spec.name: [(box, whole(spec, 1)[box.slices]) for box in rows_of(spec, 0)] for spec in SPECS}
        )

    common = {"rank": 2, "epoch": epoch, "specs": None, "num_trainers": 3, "failure": None, "order": {}, "world": {}}
    answer = perform(holder, Side.TRAINER, source, operation, {**common, "program": {}, **argument})
    return Outcome.from_plain(answer)


def session_of(holder: Holder) -> RankSession | None:
    return HeldRank.of(holder).session


def faults(*outcomes: Outcome) -> list[str]:
    return [str(outcome.fault) for outcome in outcomes]


@pytest.mark.parametrize("operation", ["connect", "adopt", "refit"])
@pytest.mark.parametrize("epoch", [4, 6])
def test_b15_a_rank_works_for_the_world_it_declared_in_and_no_other(operation: str, epoch: int) -> None:
    holder = Holder()
    assert ask(holder, "declare", 5).fault is None
    standing = session_of(holder)
    (said,) = faults(ask(holder, operation, epoch))
    assert said.startswith(f"StateError: {operation}: rank 2 was asked in epoch {epoch} and stands in epoch 5")
    assert session_of(holder) is standing
    assert standing is not None
    assert standing.state == "declared"


def test_b15_an_older_declaration_does_not_end_a_newer_session() -> None:
    holder = Holder()
    ask(holder, "declare", 5)
    standing = session_of(holder)
    (said,) = faults(ask(holder, "declare", 4))
    assert said.startswith("StateError: declare: rank 2 was asked in epoch 4, which is over: it has seen 5")
    assert session_of(holder) is standing
    assert ask(holder, "declare", 5).fault is None, "asking twice is no harm"
    assert ask(holder, "declare", 6).fault is None


def test_b15_an_older_close_does_not_end_a_newer_session() -> None:
    holder = Holder()
    ask(holder, "declare", 5)
    standing = session_of(holder)
    assert ask(holder, "close", 4, failure="given up").fault is None
    assert session_of(holder) is standing
    assert ask(holder, "close", 5).fault is None
    assert session_of(holder) is None


def test_b15_what_was_queued_before_a_close_and_runs_after_it_starts_nothing() -> None:
    """A rank that would connect now would wait, and keep its actor busy, for a world that is gone."""
    holder = Holder()
    ask(holder, "close", 5)  # ahead of the declaration it was sent after
    late = [ask(holder, operation, 5) for operation in ("declare", "connect", "adopt", "refit")]
    assert all("rank 2 has left epoch 5 for good" in said for said in faults(*late))
    assert session_of(holder) is None
    assert ask(holder, "declare", 6).fault is None


def test_b15_no_order_of_two_worlds_calls_leaves_the_older_one_standing() -> None:
    """Every order in which an actor may run what two controllers asked of it; the newer has not been closed."""
    asked = [("declare", 1), ("refit", 1), ("close", 1), ("declare", 2)]
    for order in permutations(asked):
        holder = Holder()
        for operation, epoch in order:
            ask(holder, operation, epoch)
        standing = session_of(holder)
        assert standing is not None, order
        assert standing.state == "declared", order
        assert "stands in epoch 2" in str(ask(holder, "refit", 1).fault), order


def test_a_rank_that_could_not_declare_does_nothing_else() -> None:
    holder = Holder()
    assert "was no number" in str(_declare_badly(holder).fault)
    (said,) = faults(ask(holder, "refit", 1))
    assert said.startswith("StateError: refit: rank 2 could not declare what it holds")


def _declare_badly(holder: Holder) -> Outcome:
    def source(_: int) -> ExplicitSource:
        raise ValueError("was no number")

    plain = {"rank": 2, "epoch": 1, "specs": None, "num_trainers": 3}
    return Outcome.from_plain(perform(holder, Side.TRAINER, source, "declare", plain))


class Engine(ServedRanks):
    """An engine whose ranks always do as asked; notes what they were asked."""

    def __init__(self) -> None:
        super().__init__("engine 0")
        self.asked: list[str] = []

    def on_ranks(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        del shared
        self.asked.append(operation)
        return [Outcome(int(argument["rank"])).to_plain() for argument in arguments]

    def num_unfinished(self) -> int:
        return 0

    def reset_caches(self) -> bool:
        return True


@pytest.fixture
def engine() -> Engine:
    """Serves version 1, in epoch 5."""
    made = Engine()
    for operation in ("declare", "refit", "publish"):
        _ask_engine(made, operation, 5, version=1)
    assert made.version() == 1
    made.asked.clear()
    return made


def _ask_engine(engine: Engine, operation: str, epoch: int, version: int = 1, failure: str | None = None) -> Outcome:
    argument = {"rank": 3, "epoch": epoch, "order": {"version": version}, "version": version, "failure": failure}
    (answer,) = engine.reshard(operation, [argument])
    return Outcome.from_plain(answer)


@pytest.mark.parametrize(
    "call",
    [
        partial(_ask_engine, operation="declare", epoch=4),
        partial(_ask_engine, operation="refit", epoch=4, version=0),
        partial(_ask_engine, operation="publish", epoch=4, version=0),
        partial(_ask_engine, operation="refit", epoch=6, version=2),
    ],
)
def test_b15_an_engine_serves_on_whatever_another_world_asks(engine: Engine, call: Callable[[Engine], Outcome]) -> None:
    refused = call(engine)
    assert "StateError" in str(refused.fault)
    assert "epoch" in str(refused.fault)
    assert not refused.written
    assert (engine.version(), engine.asked) == (1, [])


def test_b15_an_older_failure_does_not_take_an_engine_out_of_service(engine: Engine) -> None:
    _ask_engine(engine, "close", 4, failure="given up")
    assert engine.version() == 1
    _ask_engine(engine, "close", 5, failure="given up")
    assert engine.version() is None


def test_a_fence_of_a_rank_that_never_declared() -> None:
    fence = EpochFence()
    with pytest.raises(StateError, match="adopt: rank 7 has declared nothing yet"):
        fence.check("rank 7", "adopt", 0)
    fence.declare("rank 7", 0)
    fence.check("rank 7", "adopt", 0)
