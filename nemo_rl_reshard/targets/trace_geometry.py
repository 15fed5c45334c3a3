"""Strided views as regions, pure Python: which box of a checkpoint tensor a loader read, and where it wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nemo_rl_reshard.layout import Region


@dataclass(frozen=True, slots=True)
class Strided:
    """A view of a storage, in elements: first element, size and stride per dim, as torch reports them."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the view; 1 for a scalar."""
        return prod(self.size)

    @property
    def dims(self) -> list[tuple[int, int]]:
        """(size, stride) of every dim longer than 1, in view order."""
        return [(size, stride) for size, stride in zip(self.size, self.stride, strict=True) if size != 1]


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major stride of a dense tensor of `shape`."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Copy:
    """One proven copy: `region` of the checkpoint tensor went to `target`, which has one stride per checkpoint dim."""

    region: Region
    target: Strided


def describe_copy(shape: tuple[int, ...], source: Strided, target: Strided) -> Copy | str:
    """Explain a copy from view `source` of a dense checkpoint tensor of `shape` into view `target` of a parameter.

    Transposes and dropped or added dims of size 1 are followed, and a flattened box is unfolded. Anything else is
    answered with the reason as text: the copy is not one box of the checkpoint tensor.
    """
    if source.numel != target.numel or [size for size, _ in source.dims] != [size for size, _ in target.dims]:
        return f"its {source.size} elements are broadcast or reshaped to {target.size}"
    base = contiguous_stride(shape)
    offset = _coordinate(source.offset, shape, base)
    if offset is None:
        return "it is read from outside the tensor"
    extent = [1] * len(shape)
    stride = [1] * len(shape)
    pairs = [(size, step, jump) for (size, step), (_, jump) in zip(source.dims, target.dims, strict=True)]
    while pairs:
        size, step, jump = pairs.pop()
        dim = next((d for d in range(len(shape)) if base[d] == step and shape[d] > 1 and extent[d] == 1), None)
        if dim is None:
            return "it is not read as one box"
        if offset[dim] + size > shape[dim]:
            # A flattened view runs over several dims: unfold the inner one, if it is taken whole.
            if offset[dim] or size % shape[dim]:
                return "it is flattened across dims that are not taken whole"
            pairs.append((size // shape[dim], step * shape[dim], jump * shape[dim]))
            size = shape[dim]
        extent[dim], stride[dim] = size, jump
    region = Region(tuple(offset), tuple(extent))
    return Copy(region, Strided(target.offset, region.extent, tuple(stride)))


def through_copy(origin: Strided, copied: Strided, view: Strided) -> Strided | None:
    """The view of the original that `view` amounts to, when `copied` is an element-wise copy of the view `origin`.

    None when `view` does not follow the copy's own dims (it flattens or reinterprets them).
    """
    start = _coordinate(view.offset - copied.offset, copied.size, copied.stride)
    if start is None:
        return None
    stride = []
    free = set(range(len(copied.size)))
    for size, step in zip(view.size, view.stride, strict=True):
        if size == 1:
            stride.append(1)
            continue
        dim = next((d for d in free if copied.stride[d] == step and copied.size[d] > 1), None)
        if dim is None or start[dim] + size > copied.size[dim]:
            return None
        free.discard(dim)
        stride.append(origin.stride[dim])
    offset = origin.offset + sum(at * step for at, step in zip(start, origin.stride, strict=True))
    return Strided(offset, view.size, tuple(stride))


def locate(shape: tuple[int, ...], stride: tuple[int, ...], view: Strided) -> Region | None:
    """The box of a parameter of `shape` and `stride` that `view` covers (offset counted from its first element).

    None when the view is not one box.
    """
    offset = _coordinate(view.offset, shape, stride)
    if offset is None:
        return None
    extent = [1] * len(shape)
    pairs = list(view.dims)
    while pairs:
        size, step = pairs.pop()
        dim = next((d for d in range(len(shape)) if stride[d] == step and shape[d] > 1 and extent[d] == 1), None)
        if dim is None:
            return None
        if offset[dim] + size > shape[dim]:
            if offset[dim] or size % shape[dim]:
                return None
            pairs.append((size // shape[dim], step * shape[dim]))
            size = shape[dim]
        extent[dim] = size
    return Region(tuple(offset), tuple(extent))


def _coordinate(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int] | None:
    """Per-dim coordinate of the element at `offset`, or None when no element lies there."""
    coordinate = [0] * len(shape)
    rest = offset
    for dim in sorted(range(len(shape)), key=lambda d: (-stride[d], shape[d])):
        if shape[dim] > 1 and stride[dim]:
            coordinate[dim], rest = divmod(rest, stride[dim])
            if coordinate[dim] >= shape[dim]:
                return None
    return coordinate if rest == 0 else None
