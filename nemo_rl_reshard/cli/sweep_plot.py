"""The picture of `plan --sweep`: predicted seconds of every layout, the fastest first, with the floor of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from nemo_rl_reshard.cli.plan_plot import model_text
from nemo_rl_reshard.cli.plot_style import BLUE, INK, SKY, SUBDUED, head, write_figure
from nemo_rl_reshard.cli.quantities import bytes_text, seconds_text
from nemo_rl_reshard.cli.refit_spec import RefitSpec
from nemo_rl_reshard.cli.sweep import Row, short_names

_SHOWN = 24


def draw_sweep(rows: Sequence[Row], given: RefitSpec, path: Path) -> None:
    """Write the picture as PNG; `rows` are ranked. Raises ConfigError if it cannot be written."""
    shown = [row for place, row in enumerate(rows) if place < _SHOWN or row.is_given]
    targets, engines = short_names([row.target for row in shown])
    sources, trainers = short_names([row.source for row in shown])
    varies = len(set(sources)) > 1
    labels = [
        f"{source} \u2192 {target}" if varies else target for source, target in zip(sources, targets, strict=True)
    ]

    def fill(figure: Figure) -> None:
        topology = given.described.topology if given.described else ""
        sides = f"{trainers or sources[0]}  \u2192  {engines or targets[0]},  {topology}"
        head(figure, f"Which layout refits {model_text(given)} fastest?", f"{sides}. Tick: the floor.")
        axes = figure.subplots()
        longest = max(row.predicted["seconds"] for row in shown)
        for place, row in enumerate(shown):
            seconds, floor = row.predicted["seconds"], row.predicted["floor_seconds"]
            axes.barh(place, seconds, height=0.62, color=BLUE if row.is_given else SKY, linewidth=0)
            axes.plot((floor, floor), (place - 0.31, place + 0.31), color=INK, linewidth=1.6)
            end: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
            axes.annotate(seconds_text(seconds), (seconds, place), xytext=(5, 0), fontweight="bold", **end)
            axes.annotate(
                f"{bytes_text(row.weights_bytes)} a rank{', as given' if row.is_given else ''}",
                (seconds, place),
                xytext=(56, 0),
                color=SUBDUED,
                fontsize=8.5,
                **end,
            )
        axes.set_yticks(range(len(shown)), labels)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, longest * 1.25)
        axes.set_xlabel("predicted seconds of one refit")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)

    write_figure(path, (10.5, 1.4 + 0.3 * len(shown)), fill)
