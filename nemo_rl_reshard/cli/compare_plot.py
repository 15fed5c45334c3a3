"""The picture of `compare`: seconds per step, and where they went, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nemo_rl_reshard.cli.plot_style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PHASE_COLOURS,
    PINK,
    SKY,
    VERMILION,
    write_figure,
)
from nemo_rl_reshard.cli.quantities import seconds_text
from nemo_rl_reshard.cli.run_records import PHASES, RunRecord

RUN_COLOURS = (BLUE, VERMILION, GREEN, PINK, ORANGE, SKY)
SLIVER = 0.005
"""Phases below this share of the longest refit would be invisible, and are left out of picture and legend."""


def draw(records: Sequence[RunRecord], path: Path) -> None:
    """Write the picture as PNG. Left: each run's refits by step. Right: its median phases, stacked.

    Raises ConfigError if it cannot be written.
    """
    labels = _labels(records)

    def fill(figure: Figure) -> None:
        by_step, by_phase = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1]})
        _draw_steps(by_step, records, labels)
        _draw_phases(by_phase, records, labels)

    write_figure(path, (11, 3.4 + 0.35 * len(records)), fill)


def _labels(records: Sequence[RunRecord]) -> list[str]:
    """The backend, and the folder too where two runs share a backend."""
    backends = [record.backend for record in records]
    return [
        record.backend if backends.count(record.backend) == 1 else f"{record.backend}\n{record.path.name}"
        for record in records
    ]


def _draw_steps(axes: Axes, records: Sequence[RunRecord], labels: Sequence[str]) -> None:
    top = 0.0
    for index, (record, label) in enumerate(zip(records, labels, strict=True)):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        seconds = record.series(record.measure)
        top = max(top, *seconds)
        middle = median(seconds)
        axes.axhline(middle, color=colour, linewidth=1, linestyle=(0, (4, 3)), alpha=0.55, zorder=1)
        name = " ".join(label.split("\n"))
        axes.plot(
            [int(step["step"]) for step in record.steps],
            # A step without a refit breaks the line.
            [nan if step.get(record.measure) is None else float(step[record.measure]) for step in record.steps],
            color=colour,
            marker="o",
            markersize=4.5,
            linewidth=1.6,
            label=f"{name}, median {seconds_text(middle)}",
            zorder=2,
        )
    for number in sorted({int(step["step"]) for record in records for step in record.stale}):
        axes.axvspan(number - 0.4, number + 0.4, color=FAINT, alpha=0.6, linewidth=0, zorder=0)
        axes.annotate(
            "refit left out",
            (number, 0),
            xytext=(0, 8),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=8,
            color="#777777",
        )
    axes.set_title("Seconds per refit")
    axes.set_xlabel("training step")
    axes.set_ylabel("seconds")
    # Room above the curves for the legend.
    axes.set_ylim(0, top * (1.12 + 0.09 * len(records)) or 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right")


def _draw_phases(axes: Axes, records: Sequence[RunRecord], labels: Sequence[str]) -> None:
    longest = max(median(record.series(record.measure)) for record in records)
    shown = [
        phase
        for phase in PHASES
        if any(median(record.series(f"refit/seconds_{phase}")) > SLIVER * longest for record in records)
    ]
    ends = [0.0] * len(records)
    for phase in shown:
        widths = [median(record.series(f"refit/seconds_{phase}")) for record in records]
        axes.barh(
            range(len(records)),
            widths,
            left=ends,
            height=0.5,
            color=PHASE_COLOURS[phase],
            edgecolor="white",
            linewidth=0.8,
            label=phase,
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    unsplit = [row for row, record in enumerate(records) if not record.has_phases]
    if unsplit:
        for row in unsplit:
            ends[row] = median(records[row].series(records[row].measure))
        whole = [ends[row] for row in unsplit]
        axes.barh(unsplit, whole, height=0.5, color=FAINT, edgecolor=INK, hatch="//", linewidth=0.8, label="not split")
    for row, (record, end) in enumerate(zip(records, ends, strict=True)):
        axes.annotate(
            seconds_text(median(record.series(record.measure))),
            (end, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
    axes.set_title("Where they go, by phase")
    axes.set_xlabel("seconds; median over refits, each phase that of its slowest rank")
    axes.set_yticks(range(len(records)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max(ends) * 1.16 or 1)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.legend(
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=max(1, len(shown) + bool(unsplit)),
        handlelength=1.1,
    )
