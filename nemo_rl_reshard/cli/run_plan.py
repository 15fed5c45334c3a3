"""`plan`: what a refit moves, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_rl_reshard.cli.quantities import bytes_text, seconds_text
from nemo_rl_reshard.cli.spec import read_spec
from nemo_rl_reshard.cli.stable_json import write_json
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.plan.statistics import statistics, transfers_to_plain

_SHOWN_RANKS = 32
_SHOWN_LEFTOVERS = 12
_SHOWN_TRANSFERS = 200


def run_plan(spec_file: Path, json_file: Path | None, console: Console, *, with_transfers: bool) -> None:
    """Plan, print, and write JSON if asked. Raises ConfigError or PlanError before anything is written."""
    spec = read_spec(spec_file)
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    check_plan(plan, spec.source, spec.target, spec.routes, spec.topology)
    summary = statistics(plan, spec.source, spec.target, spec.topology)
    if with_transfers:
        summary["transfers"] = transfers_to_plain(plan)
    if json_file is not None:
        write_json(json_file, summary)
    print_summary(summary, console)


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """The plan's JSON as tables."""
    totals, predicted = summary["totals"], summary["predicted"]
    console.print(f"plan [bold]{summary['digest'][:16]}[/bold]")
    console.print(_totals(totals))
    console.print(_per_rank(summary["per_rank"]))
    phases = ", ".join(f"{phase} {seconds_text(value)}" for phase, value in predicted["phases"].items() if value)
    console.print(
        f"predicted [bold]{seconds_text(predicted['seconds'])}[/bold] ({phases}); "
        f"no schedule is faster than {seconds_text(predicted['floor_seconds'])}; "
        f"bottleneck: {predicted['bottleneck']}"
    )
    balance = summary["balance"]
    console.print(
        f"busiest over mean: network send {balance['max_network_send_over_mean']:.2f}, "
        f"receive {balance['max_network_recv_over_mean']:.2f}"
    )
    if summary["leftovers"]:
        console.print(_leftovers(summary["leftovers"]), markup=False)  # names may hold brackets
    if summary.get("transfers"):
        console.print(_transfers(summary["transfers"]), markup=False)


def _totals(totals: Mapping[str, int]) -> Table:
    table = Table(title="bytes", title_justify="left", header_style="bold")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    table.add_column("", justify="left", style="dim")
    floor, baseline = totals["network_bytes_floor"], totals["gather_broadcast_bytes"]
    moved = totals["network_bytes"] + totals["fast_bytes"] + totals["local_bytes"]
    rows = (
        ("needed by the target, each once", "unique_bytes", ""),
        ("  shard to shard", "direct_bytes", ""),
        ("  gathered and broadcast", "leftover_bytes", ""),
        ("over the network", "network_bytes", f"{_ratio(totals['network_bytes'], floor)} of the floor"),
        ("inside domains", "fast_bytes", ""),
        ("inside ranks", "local_bytes", ""),
        ("gather and broadcast would move", "gather_broadcast_bytes", f"{_ratio(baseline, moved)} of this plan"),
    )
    for label, key, remark in rows:
        table.add_row(label, bytes_text(totals[key]), remark)
    return table


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.2f}x" if whole else "-"


def _per_rank(rows: list[Mapping[str, int]]) -> Table:
    table = Table(title="per rank", title_justify="left", header_style="bold")
    keys = ("network_send", "network_recv", "fast_send", "fast_recv", "pack_bytes")
    table.add_column("rank", justify="right")
    for key in keys:
        table.add_column(key.removesuffix("_bytes").replace("_", " "), justify="right")
    for row in rows[:_SHOWN_RANKS]:
        table.add_row(str(row["rank"]), *(bytes_text(row[key]) for key in keys))
    return _note_rest(table, len(rows), _SHOWN_RANKS)


def _leftovers(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(title="leftovers: gathered, broadcast, loaded by the engine", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("reason", overflow="fold")
    for row in rows[:_SHOWN_LEFTOVERS]:
        table.add_row(row["tensor"], bytes_text(row["bytes"]), row["reason"])
    return _note_rest(table, len(rows), _SHOWN_LEFTOVERS)


def _transfers(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(title="transfers", title_justify="left", header_style="bold")
    for name in ("step", "tensor", "offset", "extent", "src", "dst", "link"):
        table.add_column(name, overflow="fold", justify="right" if name in ("step", "src", "dst") else "left")
    for row in rows[:_SHOWN_TRANSFERS]:
        table.add_row(*(str(row[name]) for name in ("step", "tensor", "offset", "extent", "src", "dst", "link")))
    return _note_rest(table, len(rows), _SHOWN_TRANSFERS)


def _note_rest(table: Table, count: int, shown: int) -> Table:
    """Say under a table how many rows it leaves out; the JSON has them all."""
    if count > shown:
        table.caption = f"and {count - shown} more; --json has them all"
        table.caption_justify = "left"
    return table
