"""Random refits where NCCL would block: nothing that ranks start can deadlock, and every element arrives. B60 B68."""

from __future__ import annotations

from collections import Counter

from equipment.nccl_semantics import NcclHub
from equipment.nccl_worlds import NcclLikeWorld
from equipment.random_refits import refits
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_reshard.cli.explicit_rank import explicit_ranks
from nemo_rl_reshard.params.routing import RoutePolicy
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
    ranks = explicit_ranks(found.source, found.target, found.plan, in_flight=in_flight, gather=gather)
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
    programs = [lower(found.plan, rank) for rank in found.ranks]
    starts = round_starts(programs, limits.messages)
    assert round_starts(reversed(programs), limits.messages) == starts
    ends: Counter = Counter()
    steps: dict[int, set[int]] = {}
    for program in programs:
        for message in program.messages:
            if message.src != message.dst:
                number = round_of(message.order, starts)
                steps.setdefault(number, set()).add(message.step)
                ends[number, program.rank, message.src == program.rank] += 1
    assert not ends or max(ends.values()) <= limits.messages
    assert all(len(found) == 1 for found in steps.values())
    assert sorted(steps) == list(range(len(starts))), "no round is empty"
