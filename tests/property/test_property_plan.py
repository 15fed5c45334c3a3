"""Plans of random refits: proven, executed on numpy against gather-then-slice, bounded, deadlock-free, at the floor."""

from collections import defaultdict
from itertools import product

from equipment.plan_runs import assert_delivered, finishes
from equipment.random_refits import refits
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.check import check_plan, check_programs
from nemo_rl_reshard.plan.codec import plan_from_text, plan_to_text
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.statistics import statistics
from nemo_rl_reshard.topology import Link


@settings(max_examples=80, deadline=None)
@given(refits())
def test_every_needed_element_arrives_exactly_once_in_both_of_two_refits(found):
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    assert_delivered(found, version=1)
    assert_delivered(found, version=2)


@settings(max_examples=60, deadline=None)
@given(refits(RoutePolicy.FFN))
def test_plans_with_leftovers_are_proven_too(found):
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    totals = statistics(found.plan, found.source, found.target, found.topology)["totals"]
    assert totals["unique_bytes"] == totals["direct_bytes"] + totals["leftover_bytes"]


@settings(max_examples=80, deadline=None)
@given(refits())
def test_inbound_bytes_of_every_domain_equal_the_floor(found):
    told = statistics(found.plan, found.source, found.target, found.topology)
    assert told["totals"]["network_bytes"] == told["totals"]["network_bytes_floor"]
    domain_of = found.topology.domains_with(found.ranks)
    inbound, needed = defaultdict(int), defaultdict(set)
    for transfer in found.plan.transfers():
        item_size = found.plan.specs[transfer.tensor].item_size
        if transfer.link is Link.NETWORK:
            inbound[domain_of[transfer.dst]] += transfer.region.numel * item_size
    # The union of a domain's needs that none of its trainers holds, painted element by element.
    for name, layout in found.target.layouts.items():
        held = defaultdict(set)
        for rank, regions in found.source.layouts[name].held:
            held[domain_of[rank]].update(element for region in regions for element in elements(region))
        for rank, regions in layout.held:
            domain = domain_of[rank]
            found_here = {element for region in regions for element in elements(region)} - held[domain]
            needed[domain].update((name, element) for element in found_here)
    sizes = {name: spec.item_size for name, spec in found.plan.specs.items()}
    expected = {domain: sum(sizes[name] for name, _ in places) for domain, places in needed.items() if places}
    assert dict(inbound) == expected


@settings(max_examples=60, deadline=None)
@given(refits(), st.sampled_from([1, 2, 4]))
def test_programs_agree_stay_bounded_and_never_deadlock(found, window):
    programs = [lower(found.plan, rank) for rank in found.ranks]
    check_programs(programs)
    assert finishes(programs, window)


@settings(max_examples=60, deadline=None)
@given(refits())
def test_plans_survive_as_text_with_all_their_programs_and_planning_is_deterministic(found):
    again = plan_from_text(plan_to_text(found.plan), found.plan.digest)
    assert again == found.plan
    assert make_plan(found.source, found.target, found.routes, found.topology, found.plan.options) == found.plan
    for rank in found.ranks:
        assert lower(again, rank) == lower(found.plan, rank)


@settings(max_examples=60, deadline=None)
@given(refits())
def test_no_prediction_beats_the_floor_and_no_balance_the_optimum(found):
    told = statistics(found.plan, found.source, found.target, found.topology)
    assert told["predicted"]["seconds"] >= told["predicted"]["floor_seconds"]
    # Whoever sends what it did not hold at the start relays: a rank of both sides may do so too.
    if all(
        any(held.contains(each.region) for held in found.source.layouts[each.tensor].regions_of(each.src))
        for each in found.plan.transfers()
        if each.link is Link.NETWORK
    ):
        assert told["balance"]["max_network_send_over_optimum"] >= 1.0


def elements(region):
    """All coordinates of a region."""
    return product(*(range(start, stop) for start, stop in zip(region.offset, region.stop, strict=True)))
