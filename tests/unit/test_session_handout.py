"""Handouts: every rank lowers its own program from one plan, to what the driver would, or refuses the plan. B09 B70."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from equipment.drawn_cases import NUM_SMALL, drawn_case
from equipment.plan_case import planned
from equipment.refit_worlds import ThreadWorld, mixed_ranks

from nemo_rl_reshard.cli.explicit_rank import LiveRank
from nemo_rl_reshard.errors import PlanError, ReshardError
from nemo_rl_reshard.params.routing import Route, RouteKind
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.plan.rounds import RoundLimits, round_starts
from nemo_rl_reshard.runtime.assignment import Assignment
from nemo_rl_reshard.runtime.handout import hand_out
from nemo_rl_reshard.runtime.one_process import LoopbackMeeting

SEEDS = [*range(0, NUM_SMALL, 4), *range(NUM_SMALL, NUM_SMALL + 60, 4)]


def through_json(plain: Any) -> Any:
    return json.loads(json.dumps(plain))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_rank_lowers_is_what_the_driver_would(seed: int) -> None:
    """Over ranks with gaps, in any order and on both sides; `labels` say who is who where worlds number otherwise."""
    found = planned(drawn_case(seed))
    labels = [*found.plan.targets, *(rank for rank in found.plan.sources if rank not in found.plan.targets)]
    plain, renumbered = (hand_out(found.plan, found.source, labels=each) for each in (None, labels))
    for place, rank in enumerate(labels):
        program = lower(found.plan, rank)
        assert Assignment.from_plain(through_json(plain.of_rank(rank)), rank).program == program
        other = Assignment.from_plain(through_json(renumbered.of_rank(place)), place)
        assert (other.program.rank, other.program.digest) == (place, program.digest)
        assert other.program.leftovers == program.leftovers
        named = [(labels[message.src], labels[message.dst]) for message in other.program.messages]
        assert named == [(message.src, message.dst) for message in program.messages]
        alike = [(message.order, message.step, message.link, message.parts) for message in program.messages]
        assert [(each.order, each.step, each.link, each.parts) for each in other.program.messages] == alike
        assert other.num_ranks == len(labels)


def test_b70_all_ranks_are_told_the_same_but_for_their_share_of_broadcast_leftovers() -> None:
    found = planned(drawn_case(NUM_SMALL))
    leftover = {name: Route(RouteKind.LEFTOVER, "all of them") for name in found.plan.specs}
    plan = make_plan(found.source, found.target, leftover, found.topology, broadcast=True)
    handout = hand_out(plan, found.source)
    assert handout.shares.keys() == set(plan.sources)
    for rank in plan.ranks:
        told = handout.of_rank(rank)
        assert told.keys() == {*handout.shared, "rank", "share"}
        assert all(told[name] is value for name, value in handout.shared.items())
        assert through_json(told) == told
        knows = {piece.rank for batch in Assignment.from_plain(told, rank).leftovers.batches for piece in batch.pieces}
        assert knows <= ({rank} if rank != min(plan.sources) else set(plan.sources))


def test_rounds_are_cut_only_where_they_are_asked_for() -> None:
    found = planned(drawn_case(NUM_SMALL))
    rank = found.plan.targets[0]
    without = Assignment.from_plain(hand_out(found.plan, found.source).of_rank(rank), rank)
    assert without.round_starts is None
    made = Assignment.from_plain(hand_out(found.plan, found.source, in_flight=4, in_rounds=True).of_rank(rank), rank)
    options = found.plan.options
    limits = RoundLimits.of(in_flight=4, bucket_bytes=options.bucket_bytes, message_bytes=options.largest_message)
    assert made.round_starts == round_starts(found.plan, limits.messages)
    assert (made.round_limits, made.program) == (limits, without.program)
    assert made.fits(made.num_ranks, in_rounds=True)
    assert not without.fits(made.num_ranks, in_rounds=True)
    assert without.fits(made.num_ranks, in_rounds=False)
    assert not made.fits(made.num_ranks + 1, in_rounds=False)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_plan_that_was_changed_is_refused_by_the_rank_with_what_to_do(place: float) -> None:
    rank = mixed_ranks()[3]
    live = LiveRank(rank, LoopbackMeeting().join)
    text = rank.handout["plan"]
    at = next(i for i in range(int(place * len(text)), len(text)) if text[i].isdigit())
    changed = text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :]
    said = r"rank 3 refuses .* changed on the way\. The next refit hands it out anew; .* the same nemo_rl_reshard"
    with pytest.raises(PlanError, match=said):
        live.session.adopt({**rank.handout, "plan": changed})
    assert live.session.adopt(rank.handout) == rank.handout["digest"]


@pytest.mark.parametrize("missing", ["digest", "plan", "labels", "in_flight", "leftovers", "round_starts", "share"])
def test_malformed_handouts_are_refused(missing: str) -> None:
    whole = mixed_ranks()[2].handout
    without = {name: value for name, value in whole.items() if name != missing}
    with pytest.raises(PlanError, match="malformed handout"):
        Assignment.from_plain(without, 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"in_flight": 0}, "in_flight 0 must be positive"),
        ({"labels": [0, 1, 2]}, "was told that the ranks of the plan are"),
        ({"labels": [0, 1, 2, 3, 4, 9]}, "was told that the ranks of the plan are"),
        ({"labels": 7}, "malformed handout"),
        ({"leftovers": {}}, "malformed leftover program"),
        ({"rank": 4}, "rank 2 was given the handout of rank 4"),
    ],
)
def test_handouts_that_contradict_themselves_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ReshardError, match=said):
        Assignment.from_plain({**mixed_ranks()[2].handout, **changed}, 2)


def test_a_rank_that_the_plan_does_not_know_is_refused() -> None:
    whole = {**mixed_ranks()[2].handout, "labels": None, "rank": 77}
    with pytest.raises(PlanError, match="rank 77 is in neither side of this plan"):
        Assignment.from_plain(whole, 77)


def test_a_trainer_without_its_share_is_refused_rather_than_send_nothing() -> None:
    with pytest.raises(PlanError, match="rank 1 is a trainer and was given no share"):
        Assignment.from_plain({**mixed_ranks()[1].handout, "share": None}, 1)


def test_no_rank_keeps_the_plan() -> None:
    def plans() -> int:
        gc.collect()
        return sum(type(each) is Plan for each in gc.get_objects())

    ranks = mixed_ranks()
    before = plans()
    with ThreadWorld(ranks) as world:
        world.refit(1)
        assert plans() == before
