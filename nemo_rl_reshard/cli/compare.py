"""`compare`: one row per run, with its ratio to the first, and the picture of their refit timings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl_reshard.cli.compare_plot import draw
from nemo_rl_reshard.cli.quantities import bytes_text
from nemo_rl_reshard.cli.run_folders import read_runs
from nemo_rl_reshard.cli.run_records import MEASURES, PHASES, SECONDS


def compare_runs(paths: Sequence[Path], plot: Path, console: Console) -> list[dict[str, Any]]:
    """Print the comparison, write the picture to `plot`, and return the figures in JSON types.

    Raises ConfigError listing everything that is wrong with the run folders; then nothing is written.
    """
    records = read_runs(paths)
    summaries = [record.summary() for record in records]
    first_s = summaries[0]["refit_seconds"]["median"]
    for summary in summaries:
        summary["ratio_to_first"] = summary["refit_seconds"]["median"] / first_s if first_s else None
    console.print(_refits(summaries))
    if any(summary["phases"] for summary in summaries):
        console.print(_phases(summaries))
    measure = records[0].measure
    if measure != SECONDS:
        console.print(f"seconds are {measure}: {MEASURES[measure]}", soft_wrap=True, markup=False)
    if any(summary["token_mult_prob_error"] for summary in summaries):
        console.print("gap x: NeMo RL's token_mult_prob_error, where 1 is none", soft_wrap=True, markup=False)
    for record in records:
        if record.note:
            console.print(f"{record.path}: {record.note}", soft_wrap=True, markup=False, style="yellow")
    draw(records, plot)
    console.print(f"plot: {plot}", soft_wrap=True, markup=False)
    return summaries


def _refits(summaries: Sequence[dict[str, Any]]) -> Table:
    """One row per run; narrow enough for 80 columns."""
    table = Table(title="refits", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    table.add_column("median s\nmin - max", justify="right", no_wrap=True)
    table.add_column("ratio", justify="right", no_wrap=True)
    table.add_column("bytes sum\nworst rank", justify="right", no_wrap=True)
    table.add_column("reward\nat end", justify="right", no_wrap=True)
    table.add_column("log-prob\ngap, stale", justify="right", no_wrap=True)
    for summary in summaries:
        seconds, ratio, reward = summary["refit_seconds"], summary["ratio_to_first"], summary["reward"]
        received = [summary["bytes_received_sum"], summary["bytes_received_max"]]
        table.add_row(
            f"{escape(summary['backend'])}\n[dim]{escape(Path(summary['run']).name)}[/dim]",
            f"[bold]{seconds['median']:.3f}[/bold]\n{seconds['min']:.3f} - {seconds['max']:.3f}",
            "" if ratio is None else f"{ratio:.2f}x",
            "\n".join("not logged" if count is None else bytes_text(count) for count in received),
            "not logged" if reward is None else f"{reward['first']:.3f}\n{reward['last']:.3f}",
            _gap(summary),
        )
    return table


def _gap(summary: dict[str, Any]) -> str:
    """Trainer against engine: the mean gap of log-probabilities, or the factor that NeMo RL logs in its place."""
    if summary["logprob_gap"] is not None:
        stale = "" if summary["stale_gap"] is None else f"\n{summary['stale_gap']:.1e}"
        return f"{summary['logprob_gap']['mean']:.1e}{stale}"
    factor = summary["token_mult_prob_error"]
    return "not logged" if factor is None else f"x {factor['mean']:.4f}"


def _phases(summaries: Sequence[dict[str, Any]]) -> Table:
    """Median seconds of each phase that some run spent time in; NeMo RL's own refits are not split."""
    table = Table(title="seconds by phase, median", title_justify="left", header_style="bold", box=SIMPLE_HEAD)
    table.add_column("run", overflow="fold")
    split = [summary["phases"] for summary in summaries if summary["phases"]]
    shown = [phase for phase in PHASES if any(phases[phase] > 0 for phases in split)]
    for phase in shown:
        table.add_column(phase, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            escape(summary["backend"]),
            *(f"{summary['phases'][phase]:.3f}" if summary["phases"] else "-" for phase in shown),
        )
    return table
