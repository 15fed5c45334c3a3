"""Scripts that start engines in a process of their own and print one line of JSON for each case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from equipment.engines import environment


def run_cases(
    script: Path, folder: Path, *arguments: str, live: bool, timeout_s: float
) -> tuple[dict[str, dict[str, Any]], str]:
    """What each case printed, by its name, and how the script ended."""
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *arguments],
        env={**os.environ, **environment(live=live)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line.removeprefix("CASE ") for line in done.stdout.splitlines() if line.startswith("CASE ")]
    found = {case["name"]: case for case in map(json.loads, lines)}
    return found, f"the script ended with {done.returncode}:\n{done.stderr[-4000:]}"
