"""The picture of `simulate`: refit times before and after, and how busy the links are meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from nemo_rl_reshard.cli.plan_plot import model_text, sides_text
from nemo_rl_reshard.cli.plot_style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    ORANGE,
    PHASE_COLOURS,
    SKY,
    SUBDUED,
    head,
    write_figure,
)
from nemo_rl_reshard.cli.quantities import seconds_text
from nemo_rl_reshard.cli.refit_spec import RefitSpec
from nemo_rl_reshard.simulate.simulation import PHASES, Simulation
from nemo_rl_reshard.simulate.timeline import FloatArray

_CLASSES = (
    ("network send", "trainers", "trainers' NICs, sending", BLUE),
    ("network send", "inference", "engines' NICs, relaying", SKY),
    ("network receive", "inference", "engines' NICs, receiving", ORANGE),
    ("fast", "inference", "engines' fast links", GREEN),
)
_LEAST_BUSY = 0.02
"""A class that nowhere reaches this fraction is left out."""


def draw_simulation(
    rows: Mapping[str, Simulation], shown: Sequence[str], floor_s: float, spec: RefitSpec, path: Path
) -> None:
    """Write the picture as PNG: a bar for every row, then the timelines of `shown`, one column each.

    Raises ConfigError if it cannot be written.
    """
    busy = [each for each in _CLASSES if any(_busy(rows[name], each).max() > _LEAST_BUSY for name in shown)]
    classes = busy or [_CLASSES[0]]

    def fill(figure: Figure) -> None:
        ours = rows[shown[-1]]
        head(
            figure,
            f"One refit of {model_text(spec)}: {seconds_text(ours.seconds)}"
            + (f", {ours.seconds / floor_s:.3g}x the floor" if floor_s else ""),
            sides_text(spec),
        )
        heights = (0.55 + 0.42 * len(rows), 0.65 + 0.8 * len(classes))
        upper, lower = figure.subfigures(2, 1, height_ratios=heights)  # type: ignore[misc]
        _draw_bars(upper.subplots(), rows, floor_s)
        _draw_timelines(lower, rows, shown, classes)

    write_figure(path, (10.5, 2.0 + 0.42 * len(rows) + 0.85 * len(classes)), fill)


def _draw_bars(axes: Axes, rows: Mapping[str, Simulation], floor_s: float) -> None:
    """One bar per row, its phases in the order of time, with its seconds; the floor as a line through all."""
    names = list(rows)
    longest = max(row.seconds for row in rows.values())
    for place, row in enumerate(rows.values()):
        end = 0.0
        for phase in PHASES:
            width = row.phases.get(phase, 0.0)
            axes.barh(place, width, left=end, height=0.62, color=PHASE_COLOURS[phase], edgecolor="white", linewidth=0.6)
            if width > 0.075 * longest:
                ink = "white" if phase in ("network", "leftover", "install") else INK
                axes.text(end + width / 2, place, phase, ha="center", va="center", fontsize=8, color=ink)
            end += width
        ratio = f"  {row.seconds / floor_s:.3g}x the floor" if floor_s else ""
        axes.annotate(
            seconds_text(row.seconds),
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
        axes.annotate(
            ratio, (end, place), xytext=(46, 0), textcoords="offset points", va="center", color=SUBDUED, fontsize=9
        )
    if floor_s:
        axes.axvline(floor_s, color=INK, linewidth=1.1, linestyle=(0, (3, 2)), zorder=0)
        axes.annotate(
            f"floor {seconds_text(floor_s)}",
            (floor_s, -0.62),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
        )
    axes.set_yticks(range(len(names)), names)
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.set_ylim(len(names) - 0.5, -0.85)
    axes.set_xlim(0, longest * 1.22)
    axes.set_xlabel("seconds")
    axes.set_title("Before and after", fontsize=10.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _draw_timelines(
    figure: SubFigure,
    rows: Mapping[str, Simulation],
    shown: Sequence[str],
    classes: Sequence[tuple[str, str, str, str]],
) -> None:
    """Busy fraction over time, one line of panels per class of links; the columns share the scale of seconds."""
    longest = max(rows[name].seconds for name in shown)
    panels = figure.subplots(len(classes), len(shown), squeeze=False, sharex=True, sharey=True)
    for column, name in enumerate(shown):
        row = rows[name]
        edges = np.linspace(0, row.seconds, len(row.timeline.series[0].busy) + 1)
        for line, each in enumerate(classes):
            axes = panels[line, column]
            busy = _busy(row, each)
            axes.stairs(busy, edges, fill=True, color=each[3], linewidth=0)
            axes.axvline(row.seconds, color=SUBDUED, linewidth=0.9)
            axes.set_xlim(0, longest * 1.02)
            axes.set_ylim(0, 1.02)
            axes.set_yticks((0, 1), ("0", "100 %"))
            axes.grid(axis="y", color=FAINT, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(length=0, labelsize=8.5)
            axes.spines["left"].set_visible(False)
            mean = float(busy.mean())
            axes.annotate(
                f"{each[2]}: {100 * mean:.0f} % busy",
                (0, 1),
                xycoords="axes fraction",
                xytext=(0, 2),
                textcoords="offset points",
                fontsize=8.5,
            )
        panels[0, column].set_title(f"Links over time: {name}", fontsize=10.5, pad=18)
        panels[-1, column].set_xlabel("seconds")


def _busy(row: Simulation, each: tuple[str, str, str, str]) -> FloatArray:
    """The busy fractions of one class, zeros where the row has none."""
    for series in row.timeline.series:
        if (series.link, series.group) == each[:2]:
            return series.busy
    return np.zeros(len(row.timeline.series[0].busy))
