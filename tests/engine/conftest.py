"""Run groups of engine cases in a process of their own, once, and hand out what each case found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equipment.engine_scripts import run_cases

EQUIPMENT = Path(__file__).parents[1] / "equipment"

Findings = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    """`findings(group, live, name, script)`: what case `name` found; its whole group runs at the first question."""
    folder = tmp_path_factory.mktemp("checkpoints")
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def ask(group: tuple[str, ...], live: bool, name: str, script: str = "engine_cases.py") -> dict[str, Any]:
        if (group, live, script) not in known:
            known[group, live, script] = _run(folder, group, live, script)
        found: dict[str, Any] = known[group, live, script][name]
        assert "error" not in found, found["error"]
        return found

    return ask


def _run(folder: Path, group: tuple[str, ...], live: bool, script: str) -> dict[str, Any]:
    found, complaint = run_cases(EQUIPMENT / script, folder, *group, live=live, timeout_s=800)
    missing = {"error": complaint}
    return {name: found.get(name, missing) for name in group}
