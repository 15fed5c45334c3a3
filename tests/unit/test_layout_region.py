"""Region algebra."""

import pytest

from nemo_rl_reshard.errors import LayoutError
from nemo_rl_reshard.layout import Region


def test_intersection_is_the_common_box():
    assert Region((0, 2), (4, 5)).intersect(Region((3, 0), (4, 4))) == Region((3, 2), (1, 2))


@pytest.mark.parametrize("other", [Region((4, 0), (2, 2)), Region((0, 5), (4, 1)), Region((1, 1), (0, 2))])
def test_regions_that_only_touch_or_are_empty_share_nothing(other):
    assert Region((0, 0), (4, 5)).intersect(other) is None


def test_scalar_regions_have_one_element_and_meet():
    scalar = Region.whole(())
    assert scalar.numel == 1
    assert scalar.intersect(Region((), ())) == scalar
    assert not scalar.is_empty


def test_split_gives_sizes_that_differ_by_at_most_one_and_never_empty():
    assert [piece.extent[0] for piece in Region((3, 0), (7, 2)).split(0, 3)] == [3, 2, 2]
    assert [piece.offset[0] for piece in Region((3, 0), (7, 2)).split(0, 3)] == [3, 6, 8]
    assert len(Region((0,), (2,)).split(0, 5)) == 2


def test_relative_to_a_shard():
    assert Region((5, 2), (2, 1)).relative_to(Region((4, 0), (4, 8))) == Region((1, 2), (2, 1))


def test_relative_to_refuses_a_region_that_sticks_out():
    with pytest.raises(LayoutError, match="not inside"):
        Region((3,), (2,)).relative_to(Region((4,), (4,)))


@pytest.mark.parametrize(("offset", "extent"), [((0,), (1, 1)), ((-1,), (1,)), ((0,), (-2,))])
def test_malformed_regions_are_refused(offset, extent):
    with pytest.raises(LayoutError):
        Region(offset, extent)
