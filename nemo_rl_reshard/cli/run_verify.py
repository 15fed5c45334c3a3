"""`verify`: run a spec's plan for real on this machine and say whether every target element is right."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nemo_rl_reshard.cli.spec import read_spec
from nemo_rl_reshard.cli.stable_json import write_json
from nemo_rl_reshard.cli.verify_spec import verify_spec


def run_verify(spec_file: Path, json_file: Path | None, console: Console, *, processes: bool) -> bool:
    """Print `PASS` or every difference; True if it passed. Raises ConfigError or PlanError before anything runs."""
    result = verify_spec(read_spec(spec_file), processes=processes)
    if json_file is not None:
        write_json(json_file, result.to_plain())
    for difference in result.differences:
        console.print(difference, markup=False, highlight=False, soft_wrap=True)
    place = "a process per rank over gloo" if processes else "one process"
    compared = f"{result.num_refits} refits of {result.num_ranks} ranks in {place}, {result.num_elements} elements"
    if result.passed:
        console.print(f"[bold green]PASS[/bold green] {compared}")
    else:
        console.print(f"[bold red]FAIL[/bold red] {compared}, {result.num_differences} differ")
    return result.passed
