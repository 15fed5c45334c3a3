"""Cutting regions against each other, and proofs of exact cover."""

import numpy as np
import pytest

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import bounded, cut, gaps, overlaps, volume

ROWS = [Region((0, 0), (4, 8)), Region((4, 0), (4, 8))]
COLUMNS = [Region((0, start), (8, 2)) for start in range(0, 8, 2)]


def test_rows_against_columns_gives_one_cell_per_pair():
    cells = cut([*ROWS, *COLUMNS])
    assert len(cells) == 8
    assert {cell.region.extent for cell in cells} == {(4, 2)}
    assert [cell.inside for cell in cells[:4]] == [(0, 2), (0, 3), (0, 4), (0, 5)]


def test_replicas_cut_differently():
    cells = cut([Region((0,), (4,)), Region((0,), (3,)), Region((2,), (4,))])
    assert [(cell.region.offset[0], cell.region.extent[0], cell.inside) for cell in cells] == [
        (0, 2, (0, 1)),
        (2, 1, (0, 1, 2)),
        (3, 1, (0, 2)),
        (4, 2, (2,)),
    ]


def test_a_needless_cut_is_joined_again():
    # The cuts of the lower half must not go through the upper one.
    cells = cut([Region((0, 0), (4, 8)), Region((4, 0), (4, 3)), Region((4, 3), (4, 5))])
    assert [cell.region for cell in cells] == [
        Region((0, 0), (4, 8)),
        Region((4, 0), (4, 3)),
        Region((4, 3), (4, 5)),
    ]


def test_equal_regions_are_one_cell_in_all_of_them():
    assert cut([ROWS[0], ROWS[0]])[0].inside == (0, 1)


def test_scalars_and_empty_regions():
    assert cut([Region((), ()), Region((), ())])[0].inside == (0, 1)
    assert cut([]) == ()
    assert cut([Region((0,), (0,)), Region((0,), (2,))]) == (cut([Region((9,), (0,)), Region((0,), (2,))])[0],)


def test_gaps_name_what_is_missing():
    assert gaps(Region.whole((8, 8)), [ROWS[0], COLUMNS[0]]) == (Region((4, 2), (4, 6)),)
    assert gaps(Region.whole((8, 8)), COLUMNS) == ()
    assert gaps(Region.whole(()), []) == (Region((), ()),)
    assert gaps(Region.whole((0, 4)), []) == ()


def test_what_lies_outside_the_whole_is_no_gap():
    assert gaps(Region((2, 0), (2, 4)), [Region((0, 0), (3, 4)), Region((6, 0), (1, 4))]) == (Region((3, 0), (1, 4)),)


def test_overlaps_name_what_is_there_twice():
    assert overlaps([Region((0,), (4,)), Region((3,), (2,))]) == (Region((3,), (1,)),)
    assert overlaps(COLUMNS) == ()
    assert overlaps(ROWS[:1]) == ()


def test_volume_counts_the_union_once():
    assert volume([*ROWS[:1], *COLUMNS[:1]]) == 32 + 16 - 8
    assert volume([]) == 0


def test_cells_agree_with_painting_the_regions():
    generator = np.random.default_rng(7)
    for _ in range(40):
        regions = []
        for _ in range(5):
            start = generator.integers(0, 5, size=3)
            regions.append(Region(tuple(start.tolist()), tuple(generator.integers(0, 4, size=3).tolist())))
        painted = np.zeros((9, 9, 9), dtype=int)
        for index, region in enumerate(regions):
            painted[region.slices] |= 1 << index
        for cell in cut(regions):
            code = sum(1 << index for index in cell.inside)
            assert (painted[cell.region.slices] == code).all()
            painted[cell.region.slices] = 0
        assert not painted.any()


@pytest.mark.parametrize("most", [1, 3, 5, 7, 20, 35, 1000])
def test_bounded_pieces_cover_and_keep_the_bound(most):
    whole = Region((2, 0, 1), (5, 7, 3))
    pieces = bounded(whole, most)
    assert max(piece.numel for piece in pieces) <= most
    assert gaps(whole, pieces) == ()
    assert overlaps(pieces) == ()
    assert sum(piece.numel for piece in pieces) == whole.numel
