"""The plans that the independent checker accepted, run between real processes over gloo, bit for bit, twice each."""

from __future__ import annotations

import pytest
from equipment.case_processes import run_cases
from equipment.drawn_cases import LARGEST_SMALL, small_cases
from equipment.layout_matrix import LARGE_PAIRS, LAYOUT_MATRIX
from equipment.plan_case import PlanCase


def fitting(cases: list[PlanCase]) -> list[PlanCase]:
    """Those that fit the processes, and each again with every rank on its own."""
    cases = [case for case in cases if len(case.ranks) <= LARGEST_SMALL]
    return cases + [case.alone() for case in cases if case.domains]


NAMED = fitting([*LAYOUT_MATRIX, *LARGE_PAIRS])
DRAWN = fitting(small_cases())


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    """All cases through eight processes, spawned once."""
    return run_cases([*NAMED, *DRAWN], LARGEST_SMALL, timeout_s=240)


@pytest.mark.parametrize("name", [case.name for case in NAMED])
def test_named_pairs_are_bit_equal_in_both_refits(outcomes: dict[str, list[str]], name: str) -> None:
    assert outcomes[name] == []


def test_drawn_pairs_are_bit_equal_in_both_refits(outcomes: dict[str, list[str]]) -> None:
    assert len(DRAWN) >= 100
    assert {name: found for name, found in outcomes.items() if name.startswith("drawn") and found} == {}
