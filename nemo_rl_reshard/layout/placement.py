"""Placement: the rule by which one mesh axis cuts a tensor, with torch's meaning of each rule."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemo_rl_reshard.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the axis holds the same elements."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """The axis cuts `dim` as torch.chunk does: equal pieces of ceil(size / parts), the last ones short or empty."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """torch's `_StridedShard(dim, split_factor)`: later axes that shard `dim` cut first, then this one.

    The sizes of those later axes multiply to `split_factor`. With no such axis, `dim` is cut into
    `axis size * split_factor` pieces and coordinate i owns pieces i, i + size, i + 2 * size, ...
    """

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"SS({self.dim},{self.split_factor})"


Placement = Replicate | Shard | StridedShard

# A split factor of 0 would leave every rank with nothing.
_PATTERN = re.compile(r"(?:(R)|S\(([0-9]{1,9})\)|SS\(([0-9]{1,9}),\s*([1-9][0-9]{0,5})\))")


def parse_placement(text: str) -> Placement:
    """Read `R`, `S(d)` or `SS(d,k)`. Raises LayoutError for anything else."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        is_torn = text.strip().startswith("SS(") and "," not in text
        hint = ' (in YAML write "SS(0,2)" with quotes)' if is_torn else ""
        raise LayoutError(f"placement {text!r} is none of R, S(d), SS(d,k) with k from 1{hint}")
    replicate, shard, strided, factor = match.groups()
    if replicate:
        return Replicate()
    if shard is not None:
        return Shard(int(shard))
    return StridedShard(int(strided), int(factor))


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of piece `index` of `size` elements cut as torch.chunk cuts; short or empty at the end."""
    piece = -(-size // parts)
    start = min(index * piece, size)
    return start, min(piece, size - start)
