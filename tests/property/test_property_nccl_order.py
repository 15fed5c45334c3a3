"""Random refits where NCCL would block: nothing that ranks start can deadlock, and every element arrives. B60 B68."""

from __future__ import annotations

from collections import Counter

import pytest
from equipment.drawn_cases import NUM_SMALL, NUM_WIDE, drawn_case
from equipment.greedy_rounds import greedy_rounds
from equipment.nccl_semantics import NcclHub
from equipment.nccl_worlds import NcclLikeWorld
from equipment.plan_case import planned
from equipment.random_refits import refits
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_reshard.cli.explicit_rank import explicit_ranks
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan import message_counts
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.rounds import RoundLimits, round_of, round_starts
from nemo_rl_reshard.runtime.leftover_plan import Gather

HUBS = st.fixed_dictionaries({"one_stream": st.booleans(), "connected": st.booleans()})


@settings(max_examples=120, deadline=None)
@given(
    refits(),
    HUBS,
    st.sampled_from([1, 2, 3, 5, 16]),
    st.sampled_from(["off", "full"]),
)
def test_no_direct_refit_deadlocks(found, hub, in_flight, verify):
    run(found, hub, in_flight, verify)


@settings(max_examples=80, deadline=None)
@given(refits(RoutePolicy.FFN), HUBS, st.sampled_from([1, 4]), st.sampled_from(list(Gather)))
def test_no_refit_with_leftovers_deadlocks_b60(found, hub, in_flight, gather):
    """Trainers gather while the root sends on: two communicators that share ranks, on one stream at worst."""
    run(found, hub, in_flight, "full", gather)


def run(found, hub, in_flight, verify, gather=Gather.EVERYWHERE):
    ranks = explicit_ranks(found.source, found.target, found.plan, in_flight=in_flight, gather=gather, in_rounds=True)
    world = NcclLikeWorld(ranks, NcclHub(len(ranks), **hub))
    world.refit(1, verify)
    world.refit(2, verify)  # every pair is connected now
    limits = ranks[0].assignment.round_limits
    if verify == "off":
        assert world.hub.most_operations <= 2 * limits.messages


@settings(max_examples=120, deadline=None)
@given(refits(), st.integers(1, 20))
def test_b68_rounds_are_bounded_by_a_rule_that_all_ranks_share(found, in_flight):
    options = found.plan.options
    limits = RoundLimits.of(
        in_flight=in_flight, bucket_bytes=options.bucket_bytes, message_bytes=options.largest_message
    )
    assert 1 <= limits.messages * limits.under_way <= in_flight
    assert limits.messages * limits.under_way * options.largest_message <= options.bucket_bytes
    assert_rounds(found.plan, limits.messages)


@settings(max_examples=120, deadline=None)
@given(refits(), st.integers(1, 9), st.sampled_from([1, 7]))
def test_rounds_do_not_depend_on_how_many_parts_are_looked_at_together(found, messages, at_once):
    starts = round_starts(found.plan, messages)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(message_counts, "_AT_ONCE", at_once)
        assert round_starts(found.plan, messages) == starts


@pytest.mark.parametrize("seed", [*range(0, NUM_SMALL, 5), *range(NUM_SMALL, NUM_SMALL + NUM_WIDE, 2)])
def test_rounds_of_drawn_plans_are_bounded_and_as_long_as_that_allows(seed):
    plan = planned(drawn_case(seed)).plan
    for messages in (1, 2, 8):
        assert_rounds(plan, messages)


def assert_rounds(plan, messages):
    """Equal to what the programs of all ranks say; each round in one step, bounded at both ends, none empty."""
    programs = [lower(plan, rank) for rank in plan.ranks]
    starts = round_starts(plan, messages)
    assert starts == greedy_rounds(programs, messages)
    ends: Counter = Counter()
    steps: dict[int, set[int]] = {}
    for program in programs:
        for message in program.messages:
            if message.src != message.dst:
                number = round_of(message.order, starts)
                steps.setdefault(number, set()).add(message.step)
                ends[number, program.rank, message.src == program.rank] += 1
    assert not ends or max(ends.values()) <= messages
    assert all(len(each) == 1 for each in steps.values())
    assert sorted(steps) == list(range(len(starts))), "no round is empty"
