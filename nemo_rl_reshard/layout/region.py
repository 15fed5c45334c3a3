"""Region: an axis-aligned box in the global coordinates of one tensor, and its algebra."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nemo_rl_reshard.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """The box `[offset, offset + extent)`, in elements, one entry per dim. A scalar has no dims and one element."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.extent):
            raise LayoutError(f"region offset {self.offset} and extent {self.extent} differ in number of dims")
        if any(value < 0 for value in self.offset + self.extent):
            raise LayoutError(f"region offset {self.offset} and extent {self.extent} must not be negative")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """The region that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def stop(self) -> tuple[int, ...]:
        """First coordinate past the region, per dim."""
        return tuple(start + size for start, size in zip(self.offset, self.extent, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return prod(self.extent)

    @property
    def is_empty(self) -> bool:
        """True when some dim has extent 0."""
        return 0 in self.extent

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that cuts this region out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.extent, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """The common box, or None when the two share no element."""
        offset = tuple(map(max, self.offset, other.offset))
        extent = tuple(min(a, b) - start for a, b, start in zip(self.stop, other.stop, offset, strict=True))
        if any(size <= 0 for size in extent):
            return None
        return Region(offset, extent)

    def contains(self, other: Region) -> bool:
        """True when every element of `other` is in this region."""
        return all(a <= b for a, b in zip(self.offset, other.offset, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )

    def relative_to(self, origin: Region) -> Region:
        """This region in the coordinates of a shard that holds `origin`. Raises LayoutError if it sticks out."""
        if not origin.contains(self):
            raise LayoutError(f"{self} is not inside {origin}")
        return Region(tuple(a - b for a, b in zip(self.offset, origin.offset, strict=True)), self.extent)

    def split(self, dim: int, parts: int) -> tuple[Region, ...]:
        """Cut along `dim` into at most `parts` non-empty pieces whose sizes differ by at most one."""
        size = self.extent[dim]
        parts = max(1, min(parts, size))
        base, extra = divmod(size, parts)
        pieces = []
        start = self.offset[dim]
        for index in range(parts):
            length = base + (index < extra)
            pieces.append(
                Region(
                    (*self.offset[:dim], start, *self.offset[dim + 1 :]),
                    (*self.extent[:dim], length, *self.extent[dim + 1 :]),
                )
            )
            start += length
        return tuple(pieces)
