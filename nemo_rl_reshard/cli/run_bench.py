"""`bench`: time a spec's refit against gather-and-broadcast and the line rate, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_rl_reshard.cli.bench_spec import bench_spec
from nemo_rl_reshard.cli.quantities import bytes_text, seconds_text
from nemo_rl_reshard.cli.spec import read_spec
from nemo_rl_reshard.cli.stable_json import write_json


def run_bench(spec_file: Path, json_file: Path | None, console: Console) -> None:
    """Measure, print, and write JSON if asked. Raises ConfigError or PlanError before anything runs."""
    spec = read_spec(spec_file)
    with console.status("measuring"):
        result = bench_spec(spec)
    if json_file is not None:
        write_json(json_file, result)
    print_bench(result, console)


def print_bench(result: Mapping[str, Any], console: Console) -> None:
    """The JSON of `bench` as a table."""
    seconds, moved = result["seconds"], result["bytes"]
    line_s_per_byte = 1 / result["line_bytes_per_s"]
    table = Table(title=f"medians of {result['repeats']} rounds", title_justify="left", header_style="bold")
    table.add_column("what")
    for name in ("time", "bytes", "of line rate"):
        table.add_column(name, justify="right")
    rows = (
        ("reshard", "reshard", moved["reshard"]),
        ("gather and broadcast", "gather_broadcast", moved["gather_broadcast"]),
        ("  gathered to one trainer only", "gather_to_root_broadcast", moved["gather_to_root_broadcast"]),
        ("line rate", "line_rate", moved["reshard"]),
    )
    for label, key, nbytes in rows:
        share = nbytes * line_s_per_byte / seconds[key]
        table.add_row(label, seconds_text(seconds[key]), bytes_text(nbytes), f"{share:.2f}")
    console.print(table)
    console.print(
        f"reshard is [bold]{result['speedup_vs_gather_broadcast']:.2f}x[/bold] as fast as gather and broadcast; extra "
        f"memory per rank at most {bytes_text(max(result['peak_extra_bytes'].values()))}"
    )
