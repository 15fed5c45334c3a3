"""`compare`: one row per run, with its ratio to the first, and the picture of their refit timings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_rl_reshard.cli.compare_plot import draw
from nemo_rl_reshard.cli.quantities import bytes_text, seconds_text
from nemo_rl_reshard.cli.run_records import PHASES, read_runs


def compare_runs(paths: Sequence[Path], plot: Path, console: Console) -> list[dict[str, Any]]:
    """Print the comparison, write the picture to `plot`, and return the figures in JSON types.

    Raises ConfigError listing everything that is wrong with the run folders; then nothing is written.
    """
    records = read_runs(paths)
    summaries = [record.summary() for record in records]
    first_s = summaries[0]["refit_seconds"]["median"]
    for summary in summaries:
        summary["ratio_to_first"] = summary["refit_seconds"]["median"] / first_s if first_s else None
    console.print(_table(summaries))
    draw(records, plot)
    console.print(f"plot: {plot}", soft_wrap=True)
    return summaries


def _table(summaries: Sequence[dict[str, Any]]) -> Table:
    """Figures as rows and runs as columns would fit a narrow terminal better; people compare rows."""
    shown = [phase for phase in PHASES if any(summary["phases"][phase] > 0 for summary in summaries)]
    table = Table(title="refits", title_justify="left", header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("refit, median\n(min - max)", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("phases, median", justify="left")
    table.add_column("bytes received\n(sum, worst rank)", justify="right")
    table.add_column("reward\nfirst -> last 5", justify="right")
    table.add_column("log-prob gap\n(stale step)", justify="right")
    for summary in summaries:
        seconds, ratio = summary["refit_seconds"], summary["ratio_to_first"]
        stale = "" if summary["stale_gap"] is None else f"\n({summary['stale_gap']:.1e})"
        table.add_row(
            f"{summary['backend']}\n[dim]{summary['run']}[/dim]",
            f"[bold]{seconds_text(seconds['median'])}[/bold]\n"
            f"({seconds_text(seconds['min'])} - {seconds_text(seconds['max'])})",
            "" if ratio is None else f"{ratio:.2f}x",
            "\n".join(f"{phase} {seconds_text(summary['phases'][phase])}" for phase in shown),
            f"{bytes_text(summary['bytes_received_sum'])}\n{bytes_text(summary['bytes_received_max'])}",
            f"{summary['reward']['first']:.3f} -> {summary['reward']['last']:.3f}",
            f"{summary['logprob_gap']['mean']:.1e}{stale}",
        )
    return table
