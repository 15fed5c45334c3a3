"""The one case table of layouts: mesh, placements and shape as plain values, and why each case is there."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class LayoutCase:
    """One tensor of `shape` on a row-major mesh; `placements` are written as `parse_placement` reads them.

    `regions` gives, per rank, the (offset, extent) pairs that torch was measured to hold, where that was measured;
    it is the fixed point that neither our algebra nor a torch release may move. `ranks` reorders the mesh.
    """

    name: str
    axes: tuple[str, ...]
    mesh: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    why: str
    regions: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...] | None = None
    ranks: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.mesh)

    @property
    def ascends(self) -> bool:
        """False when ranks descend along an axis, where torch's collectives and coordinates disagree."""
        ranks, step = self.mesh_ranks, self.size
        for length in self.mesh:
            step //= length
            if any(
                index // step % length < length - 1 and ranks[index + step] < rank for index, rank in enumerate(ranks)
            ):
                return False
        return True

    @property
    def mesh_ranks(self) -> tuple[int, ...]:
        """Ranks in row-major order of the mesh."""
        return self.ranks if self.ranks is not None else tuple(range(self.size))


def _rows(*blocks: tuple[int, int]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Row blocks (first row, count) of a one-column tensor as (offset, extent) pairs."""
    return tuple(((start, 0), (count, 1)) for start, count in blocks)


LAYOUT_CASES: tuple[LayoutCase, ...] = (
    LayoutCase("rows_even", ("dp",), (2,), ("S(0)",), (8, 2), "B05: a local shard must not be divided again"),
    LayoutCase("rows_uneven_4", ("dp",), (4,), ("S(0)",), (10, 3), "chunks of 3,3,3,1, not 3,3,2,2"),
    LayoutCase("rows_empty_rank", ("dp",), (4,), ("S(0)",), (5, 2), "B03, B04: 2,2,1,0 rows over padded storage"),
    LayoutCase("columns_uneven", ("tp",), (3,), ("S(1)",), (4, 7), "row-parallel weight, columns 3,3,1"),
    LayoutCase("columns_2", ("tp",), (2,), ("S(1)",), (6, 4), "row-parallel weight; local shards are not whole rows"),
    LayoutCase("replicated", ("tp",), (3,), ("R",), (5, 2), "a norm or a router: every rank holds all of it"),
    LayoutCase(
        "one_row", ("dp", "tp"), (2, 2), ("S(0)", "R"), (1, 17), "B02: fewer rows than ranks, shape stays (1,17)"
    ),
    LayoutCase(
        "hsdp_uneven", ("replica", "shard"), (2, 2), ("R", "S(0)"), (5, 2), "B06: ranks {0,2} and {1,3} are replicas"
    ),
    LayoutCase(
        "hsdp_2x3", ("replica", "shard"), (2, 3), ("R", "S(0)"), (7, 2), "B06 with unequal axes: 3,3,1 rows, twice"
    ),
    LayoutCase(
        "fsdp_over_columnwise",
        ("dp", "tp"),
        (2, 2),
        ("SS(0,2)", "S(0)"),
        (10, 1),
        "B01: TP cuts first, FSDP inside it; read left to right, ranks 1 and 2 would swap",
        (_rows((0, 3)), _rows((5, 3)), _rows((3, 2)), _rows((8, 2))),
    ),
    LayoutCase(
        "fsdp_over_columnwise_empty",
        ("dp", "tp"),
        (2, 3),
        ("SS(0,3)", "S(0)"),
        (7, 1),
        "B02: unequal axes, uneven rows, rank 5 holds nothing",
        (_rows((0, 2)), _rows((3, 2)), _rows((6, 1)), _rows((2, 1)), _rows((5, 1)), ()),
    ),
    LayoutCase("fsdp_over_rowwise", ("dp", "tp"), (2, 3), ("S(0)", "S(1)"), (5, 7), "two dims cut, both uneven"),
    LayoutCase(
        "fsdp_over_replicated", ("dp", "tp"), (3, 2), ("S(0)", "R"), (7, 3), "a norm's weight under FSDP over TP"
    ),
    LayoutCase(
        "two_cuts_left_to_right",
        ("a", "b"),
        (2, 2),
        ("S(0)", "S(0)"),
        (10, 1),
        "plain nested cuts: the order B01 must not have",
    ),
    LayoutCase("two_cuts_2x3", ("a", "b"), (2, 3), ("S(0)", "S(0)"), (7, 2), "nested cuts, short and empty pieces"),
    LayoutCase(
        "interleaved", ("tp",), (2,), ("SS(0,2)",), (8, 3), "gate and up packed in one tensor: two regions per rank"
    ),
    LayoutCase(
        "interleaved_uneven", ("tp",), (3,), ("SS(0,2)",), (11, 2), "two regions per rank, the last one short or gone"
    ),
    LayoutCase("stacked_experts_by_expert", ("ep",), (2,), ("S(0)",), (5, 4, 3), "B26: 5 experts over 2 ranks"),
    LayoutCase("stacked_experts_empty", ("ep",), (3,), ("S(0)",), (2, 4, 3), "B03: a rank without experts"),
    LayoutCase(
        "stacked_experts_by_row",
        ("dp", "tp"),
        (2, 3),
        ("S(0)", "S(1)"),
        (3, 10, 2),
        "experts over dp, rows over tp, both uneven",
    ),
    LayoutCase("size_one_axis", ("dp", "tp"), (1, 2), ("S(0)", "S(0)"), (4, 2), "B07: an axis of size 1 cuts nothing"),
    LayoutCase(
        "three_axes", ("replica", "dp", "tp"), (1, 2, 3), ("R", "SS(0,3)", "S(0)"), (8, 2), "three axes, one of size 1"
    ),
    LayoutCase(
        "reversed_ranks",
        ("tp",),
        (3,),
        ("S(0)",),
        (7, 2),
        "ranks descend along a sharding axis: our algebra takes it; as a DTensor torch's own gather errs",
        None,
        (2, 1, 0),
    ),
    LayoutCase(
        "column_major_ranks",
        ("dp", "tp"),
        (2, 2),
        ("S(0)", "S(1)"),
        (5, 3),
        "TP outermost in rank order",
        None,
        (0, 2, 1, 3),
    ),
    LayoutCase("vector", ("dp",), (2,), ("S(0)",), (3,), "a bias: one dim"),
)
"""Every case has at least one cutting axis of size 2 or 3; no axis pair of a two-axis case is trusted at 2x2 alone."""


def layout_case(name: str) -> LayoutCase:
    """The case of this name. Raises KeyError for another."""
    return {case.name: case for case in LAYOUT_CASES}[name]
