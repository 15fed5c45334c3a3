"""Strided views as regions, against torch's own indexing."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.targets.trace_geometry import Copy, Strided, describe_copy, locate, through_copy
from nemo_rl_reshard.targets.write_trace import geometry

SHAPE = (4, 3, 5)


def coded(shape: tuple[int, ...]) -> torch.Tensor:
    """Every element says where it is."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(count, dtype=torch.float32).view(shape)


SOURCES = {
    "whole": lambda t: t,
    "rows": lambda t: t[1:3],
    "middle dim": lambda t: t[:, 1:],
    "last dim": lambda t: t[:, :, 2:4],
    "inner box": lambda t: t[1:3, 0:2, 1:4],
    "one expert": lambda t: t[2],
    "one element": lambda t: t[3, 2, 4],
    "transposed expert": lambda t: t[1].t(),
    "permuted": lambda t: t.permute(2, 0, 1),
    "added dim": lambda t: t[:, 1].unsqueeze(1),
    "flattened whole": lambda t: t.reshape(-1),
    "flattened inner dims": lambda t: t[1:3].reshape(2, 15),
    "flattened outer dims": lambda t: t.reshape(12, 5)[3:9],
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_described_copy_moves_the_same_elements_as_the_copy(case: str) -> None:
    source = coded(SHAPE)
    taken = SOURCES[case](source)
    parameter = torch.full((2, *taken.shape, 2), -1.0)
    taken_into = parameter[1, ..., 1]
    found = describe_copy(SHAPE, geometry(taken), geometry(taken_into))
    if case == "flattened outer dims":
        # Rows 3..9 of a flattened [12, 5] are box [1:3, :, :] of [4, 3, 5].
        assert isinstance(found, Copy)
        assert found.region == Region((1, 0, 0), (2, 3, 5))
    assert isinstance(found, Copy)
    taken_into.copy_(taken)
    replayed = torch.full_like(parameter, -1.0)
    view = replayed.as_strided(found.target.size, found.target.stride, found.target.offset)
    view.copy_(source[found.region.slices])
    assert torch.equal(replayed, parameter)


@pytest.mark.parametrize(
    ("taken", "reason"),
    [
        (coded(SHAPE)[::2], "not read as one box"),
        (coded(SHAPE).as_strided((3, 7), (15, 1), 0), "flattened across dims"),
        (coded(SHAPE).diagonal(0, 0, 1), "not read as one box"),
        (coded(SHAPE)[:1].expand(2, 3, 5), "not read as one box"),
        (coded(SHAPE).reshape(-1)[2:12], "flattened across dims"),
    ],
)
def test_what_is_no_box_is_said_with_its_reason(taken: torch.Tensor, reason: str) -> None:
    base = coded(SHAPE)
    same_storage = base.as_strided(taken.shape, taken.stride(), taken.storage_offset())
    target = torch.zeros(taken.shape)
    found = describe_copy(SHAPE, geometry(same_storage), geometry(target))
    assert isinstance(found, str)
    assert reason in found


def test_a_broadcast_copy_is_no_box() -> None:
    found = describe_copy((3,), Strided(0, (3,), (1,)), Strided(0, (2, 3), (3, 1)))
    assert isinstance(found, str)
    assert "broadcast" in found


def test_a_scalar_is_one_element() -> None:
    assert describe_copy((), Strided(0, (), ()), Strided(7, (1,), (1,))) == Copy(Region((), ()), Strided(7, (), ()))


@pytest.mark.parametrize(
    "take",
    [
        lambda t: t[1:3],
        lambda t: t.t(),
        lambda t: t.t()[1:4, 2],
        lambda t: t[2].unsqueeze(0),
        lambda t: t[1:2, 2:4],
    ],
)
def test_a_view_of_a_copy_is_traced_to_the_original(take) -> None:
    original = coded((6, 5))
    origin = original.t()[1:4]  # [3, 6], not contiguous
    copied = origin.contiguous()
    view = take(copied)
    found = through_copy(geometry(origin), geometry(copied), geometry(view))
    assert found is not None
    assert torch.equal(original.as_strided(found.size, found.stride, found.offset), view)


def test_a_flattened_view_of_a_copy_is_not_traced() -> None:
    origin = coded((6, 5)).t()
    copied = origin.contiguous()
    assert through_copy(geometry(origin), geometry(copied), geometry(copied.view(-1))) is None


@pytest.mark.parametrize(
    ("take", "region"),
    [
        (lambda t: t[1:3, 2:], Region((1, 2, 0), (2, 1, 5))),
        (lambda t: t[3, 1, 2:4], Region((3, 1, 2), (1, 1, 2))),
        (lambda t: t.reshape(12, 5)[3:6], Region((1, 0, 0), (1, 3, 5))),
        (lambda t: t[::2], None),
    ],
)
def test_locate_finds_the_box_of_a_parameter(take, region: Region | None) -> None:
    parameter = coded(SHAPE)
    assert locate(SHAPE, tuple(parameter.stride()), geometry(take(parameter))) == region


def test_locate_follows_the_parameter_s_own_stride() -> None:
    parameter = coded((5, 4)).t()  # shape [4, 5], stride [1, 4]
    assert locate((4, 5), (1, 4), geometry(parameter[1:3, 2:])) == Region((1, 2), (2, 3))
