"""Cut: how one dim of a tensor is divided over the ranks of a group, in the units that must stay whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl_reshard.layout import Region


@dataclass(frozen=True, slots=True)
class Section:
    """A stretch of a dim that is divided by itself: `length` elements in `units` equal pieces that stay whole.

    With fewer units than parts, `copied` says that parts share a unit, neighbours first (key/value heads). `padded`
    counts the units of the stretch with its padding, which no checkpoint holds (a vocabulary).
    """

    length: int
    units: int
    copied: bool = False
    padded: int = 0

    def interval(self, index: int, parts: int) -> tuple[int, int]:
        """(start, stop) that part `index` of `parts` holds. `why_not` must have found no fault."""
        size = self.length // self.units
        units = self.padded or self.units
        if units < parts:
            unit = index // (parts // units)
            return unit * size, (unit + 1) * size
        share = units // parts * size
        return min(index * share, self.length), min((index + 1) * share, self.length)

    def why_not(self, parts: int) -> str:
        """Why the stretch cannot be divided into `parts`; empty if it can."""
        units = self.padded or self.units
        if units % parts == 0 and self.length % self.units == 0:
            return ""
        if self.copied and units < parts and parts % units == 0:
            return ""
        return f"{units} cannot be divided over {parts} ranks"


@dataclass(frozen=True, slots=True)
class Cut:
    """Consecutive sections of dim `dim`; a part holds its share of each. No section at all: every part holds all."""

    dim: int = 0
    sections: tuple[Section, ...] = ()

    def regions(self, shape: tuple[int, ...], index: int, parts: int) -> tuple[Region, ...]:
        """What part `index` of `parts` holds of a tensor of `shape`: a box per section, none where that is empty."""
        if not self.sections:
            return (Region.whole(shape),)
        found: list[Region] = []
        start = 0
        for section in self.sections:
            low, high = section.interval(index, parts)
            found += boxes(shape, self.dim, [(start + low, start + high)])
            start += section.length
        return tuple(found)

    def why_not(self, parts: int) -> str:
        """Why a tensor cannot be cut so into `parts`; empty if it can."""
        return next((reason for section in self.sections if (reason := section.why_not(parts))), "")


@dataclass(frozen=True, slots=True)
class FusedCut:
    """Dim 0 of a tensor that the trainer keeps inside a larger one, which is cut evenly whatever it holds.

    `stretches` are (start in the tensor, start in the larger one, length); `total` is the larger one's length.
    """

    total: int
    stretches: tuple[tuple[int, int, int], ...]

    def regions(self, shape: tuple[int, ...], index: int, parts: int) -> tuple[Region, ...]:
        """What part `index` of `parts` holds of the tensor of `shape`; none where it holds other tensors only."""
        share = self.total // parts
        intervals = []
        for start, fused, length in self.stretches:
            low, high = max(fused, index * share), min(fused + length, (index + 1) * share)
            if low < high:
                intervals.append((start + low - fused, start + high - fused))
        return boxes(shape, 0, intervals)

    def why_not(self, parts: int) -> str:
        """Why the larger tensor cannot be cut into `parts`; empty if it can."""
        return f"{self.total} fused rows cannot be divided over {parts} ranks" if self.total % parts else ""


WHOLE = Cut()


def even(shape: tuple[int, ...], dim: int, units: int | None = None) -> Cut:
    """Dim `dim` in equal parts, each of whole units; by default every element is a unit."""
    return Cut(dim, (Section(shape[dim], units or shape[dim]),))


def boxes(shape: tuple[int, ...], dim: int, intervals: Iterable[tuple[int, int]]) -> tuple[Region, ...]:
    """Intervals (start, stop) of dim `dim` as regions; neighbours become one, empty ones vanish."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(
        Region(
            (*(0,) * dim, start, *(0,) * (len(shape) - dim - 1)),
            (*shape[:dim], stop - start, *shape[dim + 1 :]),
        )
        for start, stop in joined
    )
