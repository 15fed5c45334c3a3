"""Mesh: a named grid of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from nemo_rl_reshard.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Mesh:
    """`ranks`, row-major, on a grid of `shape`; `axis_names` name its axes. Ranks may come in any order."""

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.shape):
            raise LayoutError(f"mesh has {len(self.shape)} axes and {len(self.axis_names)} axis names")
        if any(size < 1 for size in self.shape) or prod(self.shape) != len(self.ranks):
            raise LayoutError(f"mesh shape {self.shape} does not hold {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks):
            raise LayoutError(f"mesh ranks {self.ranks} name a rank twice")
        if any(rank < 0 for rank in self.ranks):
            raise LayoutError(f"mesh ranks {self.ranks} must not be negative")

    def coordinates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (rank, coordinate on every axis) in row-major order."""
        yield from zip(self.ranks, product(*map(range, self.shape)), strict=True)
