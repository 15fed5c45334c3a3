"""Timeline: how busy each kind of link was, by time, averaged over the ranks of one side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

NUM_BINS = 200


@dataclass(frozen=True)
class Series:
    """`busy` is one fraction per bin, 0 to 1, of what all ranks of `group` could do over `link`.

    `link` is one of "network send", "network receive", "fast", "pack", "install"; `group` "trainers" or "inference".
    """

    link: str
    group: str
    busy: FloatArray


@dataclass(frozen=True)
class Timeline:
    """Bins of equal width `bin_s` from 0 to the end of the refit; series in a fixed order."""

    bin_s: float
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Between two times `link` of `group` was busy to the fraction `level`."""

    link: str
    group: str
    start_s: float
    stop_s: float
    level: float


def from_segments(segments: Iterable[Segment], seconds: float, num_bins: int = NUM_BINS) -> Timeline:
    """The timeline of a few segments; those that overlap add up, to 1 at most."""
    by_name: dict[tuple[str, str], list[Segment]] = {}
    for segment in segments:
        by_name.setdefault((segment.link, segment.group), []).append(segment)
    series = []
    for (link, group), found in by_name.items():
        work = [segment.level * (segment.stop_s - segment.start_s) for segment in found]
        busy = spread([s.start_s for s in found], [s.stop_s for s in found], work, seconds, num_bins)
        series.append(Series(link, group, busy))
    return Timeline(seconds / num_bins, tuple(series))


def spread(
    starts: ArrayLike | Sequence[float],
    stops: ArrayLike | Sequence[float],
    work: ArrayLike | Sequence[float],
    seconds: float,
    num_bins: int = NUM_BINS,
) -> FloatArray:
    """Seconds of `work` spread evenly over [start, stop), as work per second in each of `num_bins` bins, 1 at most.

    An interval of no length puts its work where it starts.
    """
    if seconds <= 0:
        return np.zeros(num_bins)
    width = seconds / num_bins
    begin = np.asarray(starts, dtype=np.float64).ravel()
    end = np.maximum(np.asarray(stops, dtype=np.float64).ravel(), begin + 1e-9 * width)
    amount = np.asarray(work, dtype=np.float64).ravel()
    rate = amount / (end - begin)
    # The work done until t is a sum of ramps; each ramp is a change of slope at its start and at its end.
    times = np.concatenate([begin, end])
    slopes = np.concatenate([rate, -rate])
    order = np.argsort(times, kind="stable")
    times, slopes = times[order], slopes[order]
    slope_after = np.cumsum(slopes)
    done = np.concatenate([[0.0], np.cumsum(slope_after[:-1] * np.diff(times))])
    edges = np.linspace(0.0, seconds, num_bins + 1)
    return np.clip(np.diff(np.interp(edges, times, done)) / width, 0.0, 1.0)
