"""Run groups of engine cases in a process of their own, once, and hand out what each case found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from equipment import engines

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
    finished = subprocess.run(
        [sys.executable, str(EQUIPMENT / script), str(folder), *group],
        env={**os.environ, **engines.environment(live=live)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    lines = [line.removeprefix("CASE ") for line in finished.stdout.splitlines() if line.startswith("CASE ")]
    found = {case["name"]: case for case in map(json.loads, lines)}
    missing = {"error": f"the script ended with {finished.returncode}:\n{finished.stderr[-4000:]}"}
    return {name: found.get(name, missing) for name in group}
