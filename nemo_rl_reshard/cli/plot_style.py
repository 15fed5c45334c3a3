"""One look for all pictures: colours, fonts and how a figure is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nemo_rl_reshard.errors import ConfigError

# Colour-blind safe (Okabe and Ito).
ORANGE, BLUE, SKY, VERMILION, GREEN, PINK, GREY = (
    "#E69F00",
    "#0072B2",
    "#56B4E9",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#999999",
)
# Ordered so that neighbouring phases differ in lightness too.
PHASE_COLOURS = {
    "declare": GREY,
    "pack": ORANGE,
    "network": BLUE,
    "exchange": SKY,
    "fast": SKY,
    "leftover": VERMILION,
    "install": GREEN,
    "verify": PINK,
    "overhead": "#BBBBBB",
}
INK, SUBDUED, FAINT = "#222222", "#666666", "#e3e3e3"
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def head(figure: Figure, title: str, *lines: str) -> None:
    """A bold title over plain lines, all at the left edge, in room of their own above the panels."""
    width, height = figure.get_size_inches()
    room = 0.42 + 0.19 * len(lines)
    figure.set_layout_engine("constrained", rect=(0, 0, 1, 1 - room / height))
    left = 0.12 / width
    figure.text(left, 1 - 0.10 / height, title, fontsize=13, fontweight="bold", va="top")
    for index, line in enumerate(lines):
        figure.text(left, 1 - (0.37 + 0.19 * index) / height, line, fontsize=9.5, color=SUBDUED, va="top")


def write_figure(path: Path, size: tuple[float, float], fill: Callable[[Figure], None]) -> None:
    """Draw with `fill` and write a PNG of `size` inches. Raises ConfigError if it cannot be written."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="png", dpi=130, metadata={"Software": None}, pil_kwargs={"optimize": True})
        except OSError as fault:
            raise ConfigError(f"--plot {path}: cannot be written: {fault.strerror}") from fault
