"""Cuts in units that stay whole: heads and copies of them, padded vocabularies, sections, weights fused by trainers."""

from __future__ import annotations

import numpy as np
import pytest
from equipment import virtual_models

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.virtual.cuts import WHOLE, Cut, Section, boxes, even
from nemo_rl_reshard.virtual.fused_heads import FusedHeads


def rows(cut, shape, parts):
    """Per part, the (start, stop) of what it holds along the dim that is cut."""
    return [[(r.offset[cut.dim], r.stop[cut.dim]) for r in cut.regions(shape, index, parts)] for index in range(parts)]


def test_equal_parts_along_either_dim():
    assert rows(even((6, 4), 0), (6, 4), 3) == [[(0, 2)], [(2, 4)], [(4, 6)]]
    assert even((6, 4), 1).regions((6, 4), 1, 2) == (Region((0, 2), (6, 2)),)
    assert WHOLE.regions((6, 4), 2, 3) == (Region((0, 0), (6, 4)),)


def test_heads_stay_whole_b30():
    """B30: 12 rows are 4 heads; 3 ranks could share 12 rows, not 4 heads."""
    heads = even((12, 1), 0, 4)
    assert rows(heads, (12, 1), 2) == [[(0, 6)], [(6, 12)]]
    assert heads.why_not(3) == "4 cannot be divided over 3 ranks"
    assert heads.why_not(8) != ""


def test_neighbours_share_a_copied_head_b30():
    """B30: two key/value heads of 3 rows over 6 ranks: three copies of each, side by side."""
    cut = Cut(0, (Section(6, 2, copied=True),))
    assert rows(cut, (6, 1), 6) == [[(0, 3)]] * 3 + [[(3, 6)]] * 3
    assert cut.why_not(6) == ""
    assert cut.why_not(3) != ""


def test_a_padded_vocabulary_runs_out_before_the_ranks_do_b35():
    """B35: 130 rows padded to 192 over 6 ranks of 32: the fifth has two rows, the sixth none."""
    cut = Cut(0, (Section(130, 130, padded=192),))
    assert rows(cut, (130, 1), 6) == [[(0, 32)], [(32, 64)], [(64, 96)], [(96, 128)], [(128, 130)], []]


def test_sections_are_cut_one_by_one():
    cut = Cut(0, (Section(4, 2), Section(4, 2), Section(12, 4)))
    assert rows(cut, (20, 1), 2) == [[(0, 2), (4, 6), (8, 14)], [(2, 4), (6, 8), (14, 20)]]
    assert rows(cut, (20, 1), 1) == [[(0, 4), (4, 8), (8, 20)]]
    assert cut.why_not(4) == "2 cannot be divided over 4 ranks"


def test_neighbouring_intervals_become_one_box():
    assert boxes((4, 9, 2), 1, [(3, 5), (0, 3), (7, 7), (8, 9)]) == (
        Region((0, 0, 0), (4, 5, 2)),
        Region((0, 8, 0), (4, 1, 2)),
    )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4, 8, 16])
def test_fused_heads_hold_what_an_even_cut_of_the_fused_weight_holds(gated, parts):
    """The fused weight is built here as Megatron's converters build it, from views, and cut as an array."""
    heads, groups, size = 8, 2, 4
    model = virtual_models.model(
        virtual_models.attention(0, heads, groups, size, 1, gated=gated), num_attention_heads=8, num_key_value_heads=2
    )
    found = FusedHeads.of(model)
    assert found == FusedHeads(heads, groups, size, gated)
    query = np.arange(heads * size * (1 + gated))
    key, value = 1000 + np.arange(groups * size), 2000 + np.arange(groups * size)
    by_head = query.reshape(groups, heads // groups, 1 + gated, size)
    fused = np.concatenate(
        [
            *(by_head[:, :, half].reshape(groups, -1) for half in range(1 + gated)),
            key.reshape(groups, size),
            value.reshape(groups, size),
        ],
        axis=1,
    ).reshape(-1)
    for index, share in enumerate(np.split(fused, parts)):
        for kind, codes in (("q_proj", query), ("k_proj", key), ("v_proj", value)):
            regions = found.cut(kind).regions((len(codes), 1), index, parts)
            held = [code for region in regions for code in codes[region.slices[0]]]
            assert sorted(held) == sorted(set(share.tolist()) & set(codes.tolist()))
