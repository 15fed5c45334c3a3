"""Plans against the independent checker: named layout pairs, drawn ones, with their domains and with none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from equipment.drawn_cases import LARGEST_SMALL, small_cases, wide_cases
from equipment.independent_checker import faults_of, floor_by_domain, mask_of, program_faults_of
from equipment.layout_cases import LAYOUT_CASES
from equipment.layout_matrix import LARGE_PAIRS, LAYOUT_MATRIX, plan_case
from equipment.plan_case import Grid, PlanCase, declared, planned

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.transfer import Transfer
from nemo_rl_reshard.simulate.statistics import statistics
from nemo_rl_reshard.topology import Link

NAMED = [*LAYOUT_MATRIX, *LARGE_PAIRS]
DRAWN = [*small_cases(), *wide_cases()]


def both(cases: list[PlanCase]) -> list[PlanCase]:
    """Each case, and again with every rank on its own where that is another refit."""
    return cases + [case.alone() for case in cases if case.domains]


def assert_proven(case: PlanCase) -> None:
    """Both checkers accept the plan and what it makes the ranks do, and its figures are the painted ones."""
    found = planned(case)
    assert faults_of(case, found.plan.transfers()) == []
    assert program_faults_of(case, [lower(found.plan, rank) for rank in found.ranks]) == []
    assert [leftover.tensor for leftover in found.plan.leftovers] == list(case.leftovers)
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    if not case.leftovers:
        totals = statistics(found.plan, found.source, found.target, found.topology)["totals"]
        assert totals["network_bytes"] == totals["network_bytes_floor"] == floor_by_domain(case).total()


@pytest.mark.parametrize("case", both(NAMED), ids=lambda case: case.name)
def test_named_layout_pairs(case: PlanCase) -> None:
    assert_proven(case)


@pytest.mark.parametrize("case", both(DRAWN), ids=lambda case: case.name)
def test_drawn_layout_pairs(case: PlanCase) -> None:
    assert_proven(case)


def test_the_tables_are_as_wide_as_they_claim() -> None:
    assert len(LAYOUT_MATRIX) >= 30
    assert len(DRAWN) >= 200
    assert len({case.name for case in NAMED + DRAWN}) == len(NAMED) + len(DRAWN)
    assert all(len(case.ranks) <= LARGEST_SMALL for case in small_cases())
    assert max(len(case.ranks) for case in DRAWN) == 24
    kinds = Counter(
        kind
        for case in DRAWN
        for kind, is_so in {
            "several tensors": len(case.tensors) > 2,
            "more engines than trainers": len(case.targets) > 2 * len(case.sources),
            "both sides": bool({*case.sources} & {*case.targets}),
            "an idle engine": bool(case.idle),
            "a cast": any(pair.source_dtype for pair in case.tensors),
            "a strided cut": any("SS" in getattr(pair.source, "placements", "") for pair in case.tensors),
            "a scalar": any(pair.shape == () for pair in case.tensors),
            "mixed domains": any(0 < len({*domain} & {*case.sources}) < len(domain) for domain in case.domains),
        }.items()
        if is_so
    )  # fmt: skip
    assert len(kinds) == 8
    assert min(kinds.values()) >= 10, kinds


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
def test_the_checker_reads_layouts_as_torch_was_measured_to_cut(case) -> None:
    """What the checker cuts with torch.chunk is what torch held, where measured, and what the package computes."""
    grid = Grid(case.mesh, " ".join(case.placements), case.mesh_ranks)
    layout = declared(grid, case.shape)
    for rank in range(case.size):
        mask = mask_of(grid, case.shape, rank)
        ours = np.zeros(case.shape, dtype=bool)
        for region in layout.regions_of(rank):
            ours[region.slices] = True
        assert (mask == ours).all()
        if case.regions is not None:
            measured = np.zeros(case.shape, dtype=bool)
            for offset, extent in case.regions[rank]:
                measured[Region(offset, extent).slices] = True
            assert (mask == measured).all()


FAULTY = plan_case("tp4_to_tp2_dp2")


def transfers() -> list[Transfer]:
    """A good plan's, those over the network first."""
    return sorted(planned(FAULTY).plan.transfers(), key=lambda each: (each.link is not Link.NETWORK, each.step))


def at(found: list[Transfer], link: Link) -> int:
    """Index of the first transfer over `link`."""
    return next(index for index, each in enumerate(found) if each.link is link)


def lost(found: list[Transfer]) -> list[Transfer]:
    return found[1:]


def twice(found: list[Transfer]) -> list[Transfer]:
    return [*found, found[at(found, Link.FAST)]]


def misnamed(found: list[Transfer]) -> list[Transfer]:
    return [replace(found[0], link=Link.FAST), *found[1:]]


def forwarded_at_once(found: list[Transfer]) -> list[Transfer]:
    return [replace(each, step=0) for each in found]


def from_another_trainer(found: list[Transfer]) -> list[Transfer]:
    return [replace(found[0], src=(found[0].src + 1) % 4), *found[1:]]


def short(found: list[Transfer]) -> list[Transfer]:
    region = found[0].region
    cut = Region(region.offset, (region.extent[0], region.extent[1] - 1))
    return [replace(found[0], region=cut), *found[1:]]


def to_the_wrong_engine(found: list[Transfer]) -> list[Transfer]:
    last = found[at(found, Link.FAST)]
    return [*found, Transfer(last.tensor, found[0].region, found[0].src, 4 + (found[0].dst - 3) % 4, Link.NETWORK, 0)]


def across_for_every_replica(found: list[Transfer]) -> list[Transfer]:
    index = at(found, Link.FAST)
    sender = next(each.src for each in found if each.region == found[index].region and each.link is Link.NETWORK)
    return [*found[:index], replace(found[index], src=sender, link=Link.NETWORK), *found[index + 1 :]]


def of_a_leftover(found: list[Transfer]) -> list[Transfer]:
    return [*found, replace(found[0], tensor="model.norm.weight")]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lost, "misses"),
        (twice, "gets more than once"),
        (misnamed, "it is network"),
        (forwarded_at_once, "does not have all of it by then"),
        (from_another_trainer, "does not have all of it by then"),
        (short, "misses"),
        (to_the_wrong_engine, "gets without need"),
        (across_for_every_replica, "bytes enter, the floor is"),
        (of_a_leftover, "is not to be sent directly"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_checker_sees_every_kind_of_fault(spoil, says: str) -> None:
    good = transfers()
    assert faults_of(FAULTY, good) == []
    assert any(says in fault for fault in faults_of(FAULTY, spoil(good)))


def test_the_checker_sees_a_bucket_that_overflows() -> None:
    """Everything in two steps, into buckets of two elements."""
    crowded = replace(FAULTY, bucket_bytes=8)
    found = faults_of(crowded, transfers())
    assert found
    assert all("a bucket holds 8" in fault for fault in found)


def test_the_checker_sees_programs_that_disagree_or_run_backwards() -> None:
    found = planned(FAULTY)
    programs = sorted((lower(found.plan, rank) for rank in found.ranks), key=lambda program: len(program.messages))
    *others, longest = programs
    assert len(longest.messages) > 1
    backwards = replace(longest, messages=longest.messages[::-1])
    assert any("after" in fault for fault in program_faults_of(FAULTY, [*others, backwards]))
    silent = replace(longest, messages=longest.messages[1:])
    assert any("is known to" in fault for fault in program_faults_of(FAULTY, [*others, silent]))
    long = replace(FAULTY, message_bytes=8)
    assert any("has" in fault and "bytes" in fault for fault in program_faults_of(long, programs))
