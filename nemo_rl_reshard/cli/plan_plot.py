"""The picture of `plan`: what every rank sends and receives, the busiest first, over the network and inside domains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from nemo_rl_reshard.cli.plot_style import BLUE, FAINT, INK, ORANGE, head, write_figure
from nemo_rl_reshard.cli.quantities import bytes_text, seconds_text
from nemo_rl_reshard.cli.refit_spec import RefitSpec
from nemo_rl_reshard.topology import Topology

_LINKS = (("network", "Over the network"), ("fast", "Inside domains, over fast links"))
_FLOAT = NDArray[np.float64]


def draw_load(summary: Mapping[str, Any], spec: RefitSpec, path: Path) -> None:
    """Write the picture as PNG; `summary` is the plan's JSON. Raises ConfigError if it cannot be written."""
    rows = summary["per_rank"]
    used = [link for link in _LINKS if any(row[f"{link[0]}_send"] for row in rows)] or [_LINKS[0]]

    def fill(figure: Figure) -> None:
        predicted, floor = summary["predicted"], summary["predicted"]["floor_seconds"]
        ratio = f", {predicted['seconds'] / floor:.2f}x the floor" if floor else ""
        head(
            figure,
            f"What each rank moves in one refit of {model_text(spec)}",
            sides_text(spec),
            f"Predicted {seconds_text(predicted['seconds'])}{ratio}. Ranks sorted by what they move.",
        )
        for axes, (link, name) in zip(figure.subplots(len(used), 1, squeeze=False)[:, 0], used, strict=True):
            _draw_link(axes, link, name, rows, spec)

    write_figure(path, (10.5, 1.2 + 2.6 * len(used)), fill)


def model_text(spec: RefitSpec) -> str:
    """What a picture's title calls the model."""
    return spec.described.model if spec.described else f"{len(spec.target.specs)} tensors"


def sides_text(spec: RefitSpec) -> str:
    """Both sides and the machine on one line."""
    if spec.described is None:
        return f"{len(spec.source.ranks)} trainers  \u2192  {len(spec.target.ranks)} inference ranks"
    return f"{spec.described.source}  \u2192  {spec.described.target},  {spec.described.topology}"


def _draw_link(axes: Axes, link: str, name: str, rows: Sequence[Mapping[str, int]], spec: RefitSpec) -> None:
    """Sends upwards, receives downwards, each sorted among the ranks of its side."""
    gap = max(1.0, 0.04 * len(rows))
    start, tops = 0.0, {1: 0.0, -1: 0.0}
    for side, ranks in (("trainers", set(spec.source.ranks)), ("inference ranks", set(spec.target.ranks))):
        own = [row for row in rows if row["rank"] in ranks]
        edges = start + np.arange(len(own) + 1, dtype=np.float64)
        for key, sign, colour in ((f"{link}_send", 1, BLUE), (f"{link}_recv", -1, ORANGE)):
            loads = np.sort(np.array([row[key] for row in own], dtype=np.float64))[::-1]
            if loads.any():
                axes.stairs(sign * loads, edges, fill=True, color=colour, linewidth=0)
                _label_load(axes, sign, loads, edges, spec.topology, link)
                tops[sign] = max(tops[sign], loads[0])
        middle = (edges[0] + edges[-1]) / 2
        place: dict[str, Any] = {
            "xycoords": ("data", "axes fraction"),
            "textcoords": "offset points",
            "ha": "center",
            "va": "top",
        }
        axes.annotate(f"{len(own)} {side}", (middle, 0), xytext=(0, -3), fontweight="bold", **place)
        start = edges[-1] + gap
    highest = max(tops.values()) or 1.0
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_title(name, fontsize=10.5)
    axes.set_xlim(0, start - gap)
    axes.set_ylim(-max(tops[-1] + 0.2 * highest, 0.02 * highest), tops[1] + 0.2 * highest)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(abs(value)) if value else "0"))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _label_load(axes: Axes, sign: int, loads: _FLOAT, edges: _FLOAT, topology: Topology, link: str) -> None:
    """The busiest rank, how far it is above the mean (a dashed line, if it is), and how long it takes at line rate."""
    busiest, mean = float(loads[0]), float(loads.mean())
    rate = topology.network_bytes_per_s / topology.ranks_per_nic if link == "network" else topology.fast_bytes_per_s
    if busiest > 1.02 * mean:
        level = (sign * mean, sign * mean)
        axes.plot((edges[0], edges[-1]), level, color="white", linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{'sends' if sign > 0 else 'receives'} at most {bytes_text(busiest)}, {busiest / mean:.2f}x the mean; "
        f"{seconds_text(busiest / rate)} at line rate",
        (edges[0], sign * busiest),
        xytext=(0, 3 * sign),
        textcoords="offset points",
        va="bottom" if sign > 0 else "top",
        fontsize=8.5,
    )
