"""The tables of `plan`: bytes by link, load and memory by side, where the time goes, leftovers, transfers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_rl_reshard.cli.quantities import bytes_text, seconds_text
from nemo_rl_reshard.cli.refit_spec import RefitSpec, held_bytes
from nemo_rl_reshard.params.routing import RouteKind
from nemo_rl_reshard.params.spec import TensorSpec

_SHOWN_RANKS = 32
_SHOWN_LEFTOVERS = 12
_SHOWN_TRANSFERS = 200
_LOADS = ("network_send", "network_recv", "fast_send", "fast_recv")
_BAR = 24  # characters of the longest phase


def print_summary(summary: Mapping[str, Any], spec: RefitSpec, console: Console) -> None:
    """The plan's JSON as tables. Names may hold brackets, so nothing is read as markup."""
    if spec.described is not None:
        print_heading(spec, console)
    console.print(f"plan {summary['digest'][:16]}", style="bold", highlight=False)
    console.print(_totals(summary["totals"]))
    console.print(_by_side(summary["per_rank"], spec))
    if len(summary["per_rank"]) <= _SHOWN_RANKS:
        console.print(_per_rank(summary["per_rank"]))
    _print_time(summary["predicted"], console)
    _print_balance(summary["balance"], console)
    if summary["leftovers"]:
        few = len(summary["leftovers"]) <= _SHOWN_LEFTOVERS
        console.print((_leftovers if few else _leftovers_by_reason)(summary["leftovers"]), markup=False)
    if summary.get("transfers"):
        console.print(_transfers(summary["transfers"]), markup=False)


def print_heading(spec: RefitSpec, console: Console) -> None:
    """What a spec by model describes, and what of it is assumed."""
    assert spec.described is not None
    console.print(spec.described.title, style="bold", markup=False, highlight=False, soft_wrap=True)
    for assumption in spec.described.assumptions:
        console.print(f"assumed: {assumption}", style="yellow", markup=False, highlight=False, soft_wrap=True)


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


def _by_side(rows: Sequence[Mapping[str, int]], spec: RefitSpec) -> Table:
    """Mean and busiest load of each side's ranks, and what they hold."""
    columns = []
    for catalog in (spec.source, spec.target):
        ranks = set(catalog.ranks)
        own = [row for row in rows if row["rank"] in ranks]
        columns.append([[row[key] for row in own] for key in _LOADS] + [list(held_bytes(catalog).values())])
    counts = f"{len(spec.source.ranks)} trainers, {len(spec.target.ranks)} inference ranks"
    table = Table(title=f"per rank: {counts}", title_justify="left", header_style="bold")
    table.add_column("bytes")
    for name in ("trainers: mean", "busiest", "inference: mean", "busiest"):
        table.add_column(name, justify="right")
    for label, *sides in zip((*_LOADS, "weights held"), *columns, strict=True):
        cells = [cell for values in sides for cell in _mean_and_most(values)]
        table.add_row(label.replace("recv", "receive").replace("_", " "), *cells)
    leftover = max((leftover.nbytes for leftover in _leftover_specs(spec)), default=0)
    buffers = 2 * spec.options.bucket_bytes + (2 * max(leftover, spec.options.bucket_bytes // 4) if leftover else 0)
    table.caption = f"a refit adds at most {bytes_text(buffers)} of buffers to what a rank holds"
    table.caption_justify = "left"
    return table


def _leftover_specs(spec: RefitSpec) -> list[TensorSpec]:
    return [spec.target.specs[name] for name, route in spec.routes.items() if route.kind is RouteKind.LEFTOVER]


def _mean_and_most(values: Sequence[int]) -> tuple[str, str]:
    if not any(values):
        return "-", "-"
    return bytes_text(sum(values) / len(values)), bytes_text(max(values))


def _per_rank(rows: Sequence[Mapping[str, int]]) -> Table:
    table = Table(title="each rank", title_justify="left", header_style="bold")
    keys = (*_LOADS, "pack_bytes")
    table.add_column("rank", justify="right")
    for key in keys:
        table.add_column(key.removesuffix("_bytes").replace("_", " "), justify="right")
    for row in rows:
        table.add_row(str(row["rank"]), *(bytes_text(row[key]) for key in keys))
    return table


def _print_time(predicted: Mapping[str, Any], console: Console) -> None:
    """The phases as bars that follow each other, and how far the whole is from the floor."""
    total, floor = predicted["seconds"], predicted["floor_seconds"]
    share = f", {100 * total / floor:.0f} % of the floor" if floor else ""
    console.print(
        f"predicted [bold]{seconds_text(total)}[/bold]{share}; "
        f"no schedule is faster than {seconds_text(floor)} ({predicted['floor_bottleneck']}); "
        f"bottleneck: {predicted['bottleneck']}",
        highlight=False,
    )
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    table.add_column("bar")
    done = 0.0
    for phase, seconds in predicted["phases"].items():
        if seconds:
            start, end = (round(_BAR * moment / total) for moment in (done, done + seconds))
            table.add_row(f"  {phase}", seconds_text(seconds), f"{' ' * start}{'█' * max(end - start, 1)}")
            done += seconds
    if table.row_count:
        console.print(table, highlight=False)


def _print_balance(balance: Mapping[str, float], console: Console) -> None:
    optimum = balance.get("max_network_send_over_optimum")
    least = "" if optimum is None else f"; busiest sender {optimum:.2f}x the least possible without relays"
    console.print(
        f"busiest over mean: network send {balance['max_network_send_over_mean']:.2f}, "
        f"receive {balance['max_network_recv_over_mean']:.2f}{least}",
        highlight=False,
    )


def _leftovers(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="leftovers: gathered, broadcast, loaded by the engine", title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("reason", overflow="fold")
    for row in rows:
        table.add_row(row["tensor"], bytes_text(row["bytes"]), row["reason"])
    return table


def _leftovers_by_reason(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per reason, the largest first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["reason"], []).append(row)
    table = Table(title="leftovers: gathered, broadcast, loaded by the engine", title_justify="left")
    table.add_column("tensors", justify="right")
    table.add_column("bytes", justify="right")
    table.add_column("reason", overflow="fold")
    table.add_column("largest", overflow="fold")
    for reason, members in sorted(groups.items(), key=lambda item: -sum(row["bytes"] for row in item[1])):
        largest = max(members, key=lambda row: row["bytes"])
        table.add_row(str(len(members)), bytes_text(sum(row["bytes"] for row in members)), reason, largest["tensor"])
    table.caption = "--json lists each of them"
    table.caption_justify = "left"
    return table


def _transfers(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="transfers", title_justify="left", header_style="bold")
    for name in ("step", "tensor", "offset", "extent", "src", "dst", "link"):
        table.add_column(name, overflow="fold", justify="right" if name in ("step", "src", "dst") else "left")
    for row in rows[:_SHOWN_TRANSFERS]:
        table.add_row(*(str(row[name]) for name in ("step", "tensor", "offset", "extent", "src", "dst", "link")))
    if len(rows) > _SHOWN_TRANSFERS:
        table.caption = f"and {len(rows) - _SHOWN_TRANSFERS} more; --json has them all"
        table.caption_justify = "left"
    return table
