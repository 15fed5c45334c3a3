"""Placements on meshes: which rank gets which regions, with torch's measured figures as fixed points."""

import pytest
from equipment.declaring import layout, rows
from equipment.layout_cases import LAYOUT_CASES

from nemo_rl_reshard.errors import LayoutError
from nemo_rl_reshard.layout import Mesh, Region, TensorLayout, parse_placement
from nemo_rl_reshard.layout.tiling import gaps, overlaps

CASES = [pytest.param(case, id=case.name) for case in LAYOUT_CASES]


def layout_of(case):
    mesh = Mesh(case.axes, case.mesh, tuple(case.mesh_ranks))
    return TensorLayout.from_mesh(case.shape, mesh, tuple(parse_placement(text) for text in case.placements))


@pytest.mark.parametrize("case", CASES)
def test_every_case_covers_its_tensor_and_no_rank_holds_an_element_twice(case):
    found = layout_of(case)
    assert gaps(Region.whole(case.shape), [region for _, regions in found.held for region in regions]) == ()
    assert all(overlaps(regions) == () for _, regions in found.held)


@pytest.mark.parametrize("case", [case for case in CASES if case.values[0].regions is not None])
def test_every_case_gives_what_torch_was_measured_to_hold(case):
    found = layout_of(case)
    for rank, regions in zip(case.mesh_ranks, case.regions, strict=True):
        assert found.regions_of(rank) == tuple(Region(offset, extent) for offset, extent in regions)


def test_b01_tensor_parallel_cuts_first_and_fsdp_inside_it():
    found = layout((10, 1), (2, 2), "SS(0,2) S(0)", range(4))
    assert found == rows((10, 1), {0: [(0, 3)], 1: [(5, 3)], 2: [(3, 2)], 3: [(8, 2)]})


def test_b02_uneven_strided_shard_leaves_a_rank_empty():
    found = layout((7, 1), (2, 3), "SS(0,3) S(0)", range(6))
    assert found == rows((7, 1), {0: [(0, 2)], 1: [(3, 2)], 2: [(6, 1)], 3: [(2, 1)], 4: [(5, 1)]})
    assert 5 not in found.ranks


def test_b02_one_row_over_two_ranks_keeps_the_global_shape():
    found = layout((1, 17), (2, 2), "S(0) R", range(4))
    assert found.shape == (1, 17)
    assert found.ranks == (0, 1)


def test_b05_a_shard_is_cut_once():
    assert layout((8, 2), (2,), "S(0)", range(2)) == rows((8, 2), {0: [(0, 4)], 1: [(4, 4)]})


def test_b06_hsdp_groups_are_the_ranks_of_equal_regions():
    found = layout((5, 2), (2, 2), "R S(0)", range(4))
    assert found.regions_of(0) == found.regions_of(2) == (Region((0, 0), (3, 2)),)
    assert found.regions_of(1) == found.regions_of(3) == (Region((3, 0), (2, 2)),)


def test_b07_an_axis_of_size_one_is_no_cut():
    assert layout((4, 2), (1, 2), "S(0) S(0)", range(2)) == rows((4, 2), {0: [(0, 2)], 1: [(2, 2)]})
    assert layout((4, 2), (1, 2), "R S(0)", range(2)) == layout((4, 2), (1, 2), "S(1) S(0)", range(2))


def test_b07_partial_is_replicate_on_an_axis_of_size_one_and_refused_on_a_larger_one():
    class Partial:
        pass

    one, two = Mesh(("dp", "tp"), (1, 2), (0, 1)), Mesh(("dp", "tp"), (2, 1), (0, 1))
    cut_rows = parse_placement("S(0)")
    assert TensorLayout.from_mesh((4, 2), one, (Partial(), cut_rows)) == rows((4, 2), {0: [(0, 2)], 1: [(2, 2)]})
    with pytest.raises(LayoutError, match="a sum is not a weight"):
        TensorLayout.from_mesh((4, 2), two, (Partial(), cut_rows))


def test_strided_shard_alone_owns_several_regions():
    found = layout((8, 3), (2,), "SS(0,2)", range(2))
    assert found == rows((8, 3), {0: [(0, 2), (4, 2)], 1: [(2, 2), (6, 2)]})


def test_layouts_compare_by_meaning_not_by_spelling():
    assert layout((6, 2), (2,), "S(0)", (4, 9)) == layout((6, 2), (2, 1), "S(0) R", (4, 9))
    assert hash(layout((6, 2), (2,), "S(0)", (4, 9))) == hash(rows((6, 2), {9: [(3, 3)], 4: [(0, 3)]}))


def test_mesh_ranks_may_come_in_any_order():
    assert layout((6, 1), (3,), "S(0)", (7, 2, 5)) == rows((6, 1), {7: [(0, 2)], 2: [(2, 2)], 5: [(4, 2)]})


@pytest.mark.parametrize(
    ("mesh", "placements", "hint"),
    [
        ((2, 2), "S(0)", "1 placements for a mesh of 2 axes"),
        ((2,), "S(2)", "has no dim 2"),
        ((2, 2), "SS(0,3) S(0)", "must be the split factor 3"),
    ],
)
def test_rules_that_do_not_fit_are_refused(mesh, placements, hint):
    with pytest.raises(LayoutError, match=hint.replace("(", r"\(")):
        layout((8, 8), mesh, placements, range(4 if len(mesh) == 2 else 2))


@pytest.mark.parametrize("text", ["", "S", "S(-1)", "P", "SS(0)", "SS(0", "SS(0,0)", "S(\u0660)", "R\nR"])
def test_unknown_placements_are_refused_by_name(text):
    with pytest.raises(LayoutError, match="none of R"):
        parse_placement(text)


def test_a_split_factor_beyond_the_elements_leaves_empty_pieces():
    """Coordinate i of 2 owns rows i, i + 2, ...; the other 999,995 of a million pieces are empty and cost nothing."""
    assert layout((5,), (2,), "SS(0,500000)", range(2)) == rows(
        (5,), {0: [(0, 1), (2, 1), (4, 1)], 1: [(1, 1), (3, 1)]}
    )


def test_unquoted_strided_placement_gets_the_yaml_hint():
    with pytest.raises(LayoutError, match="with quotes"):
        parse_placement("SS(0")


@pytest.mark.parametrize(
    ("names", "shape", "ranks", "hint"),
    [
        (("a",), (2,), (0,), "does not hold 1 ranks"),
        (("a",), (2,), (1, 1), "name a rank twice"),
        (("a", "b"), (2,), (0, 1), "2 axis names"),
        (("a",), (2,), (0, -1), "must not be negative"),
    ],
)
def test_malformed_meshes_are_refused(names, shape, ranks, hint):
    with pytest.raises(LayoutError, match=hint):
        Mesh(names, shape, ranks)
