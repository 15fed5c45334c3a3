"""The message clock, by cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from equipment.declaring import one_tensor
from equipment.message_clock import message_clock
from equipment.plain_links import GB, PLAIN
from equipment.shared_links import Road, SharedLinks

from nemo_rl_reshard.plan.plan import PlanOptions


def milliseconds(source, target, topology=PLAIN, *, message_bytes=1 << 30, **options):
    """A refit of 1 MB, 1000 rows: 1 ms at 1 GB/s."""
    case = one_tensor((1000, 250), source, target, topology, PlanOptions(1 << 30, message_bytes))
    return message_clock(case.plan, case.source, topology, **options) * 1000


def drained(links: SharedLinks) -> dict[str, float]:
    """When each message ends if nothing else comes."""
    found: dict[str, float] = {}
    while links.next_end() < float("inf"):
        now = links.next_end()
        found |= {str(name): now for name in links.go_to(now)}
    return found


@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_message_is_packed_sent_awaited_and_installed(in_rounds):
    topology = replace(PLAIN, network_latency_s=0.25e-3, memory_bytes_per_s=10 * GB)
    found = milliseconds(([1], "R", [0]), ([1], "R", [1]), topology, in_rounds=in_rounds)
    assert found == pytest.approx(0.2 + 1 + 0.25 + 0.3)


@pytest.mark.parametrize("in_rounds", [False, True])
def test_halves_go_side_by_side(in_rounds):
    assert milliseconds(([2], "S(0)", [0, 1]), ([2], "S(0)", [2, 3]), in_rounds=in_rounds) == pytest.approx(0.5)
    assert milliseconds(([2], "S(0)", [0, 1]), ([1], "R", [2]), in_rounds=in_rounds) == pytest.approx(1)


@pytest.mark.parametrize(("in_flight", "in_rounds", "expected"), [(1, False, 2.0), (4, False, 1.25), (4, True, 1.5)])
def test_latency_is_paid_by_window_or_by_round(in_flight, in_rounds, expected):
    """Four messages of 0.25 ms and a latency of 0.25 ms: one by one, all together, and by two rounds of two."""
    topology = replace(PLAIN, network_latency_s=0.25e-3)
    pair = ([1], "R", [0]), ([1], "R", [1])
    found = milliseconds(*pair, topology, message_bytes=GB // 4000, in_flight=in_flight, in_rounds=in_rounds)
    assert found == pytest.approx(expected)


def test_links_are_shared_max_min_fairly():
    """a and b leave together and have half each; c enters where b does and has what b leaves, then all of it."""
    roads = {"a": Road("x", "p", 1.0, (0, 1)), "b": Road("x", "q", 1.0, (0, 2)), "c": Road("y", "q", 1.0, (3, 2))}
    links = SharedLinks(roads.values())
    for name, nbytes in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        links.add(roads[name], name, nbytes)
    assert drained(links) == pytest.approx({"a": 2.0, "b": 2.0, "c": 3.0})


def test_what_a_slow_end_does_not_take_the_others_share():
    """p takes three messages and so a third of each; x gives its fourth road the two thirds that are left."""
    roads = [Road("x", "p", 1.0, (0, 1)), Road("y", "p", 1.0, (2, 1)), Road("z", "p", 1.0, (3, 1))]
    other = Road("x", "q", 1.0, (0, 4))
    links = SharedLinks([*roads, other])
    for index, road in enumerate(roads):
        links.add(road, f"p{index}", 1.0)
    links.add(other, "q", 2.0)
    assert drained(links) == pytest.approx({"p0": 3.0, "p1": 3.0, "p2": 3.0, "q": 3.0})


def test_messages_of_a_pair_follow_each_other():
    road = Road("x", "p", 2.0, (0, 1))
    links = SharedLinks([road])
    links.add(road, "first", 2.0)
    links.add(road, "second", 4.0)
    assert drained(links) == pytest.approx({"first": 1.0, "second": 3.0})
