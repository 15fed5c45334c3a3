"""Which box of a tensor each result of a function is, read from the strides of a run that touches no values."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_rl_reshard.layout import Region

_ATEN = torch.ops.aten
_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
_BY_MEMORY = (_ATEN.as_strided.default,)
_UNTOLD = (*_COPIES, _ATEN.alias.default, _ATEN.detach.default)


class NotAViewError(Exception):
    """The function computes with the tensor, or writes to it; the text says which operation."""


class ViewTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, copies of `whole` and of its views are made without copying, as views of the same memory.

    So a result that still lies in the memory of `whole` was made by views and plain copies alone, and its strides say
    which elements it is. Writing to that memory raises NotAViewError. With `strict`, so does every operation that
    reads from it; without, such an operation runs, and its result lies elsewhere. `operations` lists the views taken.
    """

    def __init__(self, whole: torch.Tensor, *, strict: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self._whole = whole
        self._strict = strict

    def shares(self, tensor: torch.Tensor) -> bool:
        """True for `whole` and its views, read with the same dtype and no lazy sign or conjugation."""
        return (
            self._touches(tensor) and tensor.dtype == self._whole.dtype and not tensor.is_neg() and not tensor.is_conj()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation; see the class."""
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) and self._touches(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            raise NotAViewError(f"{func} writes to the tensor")
        if func in _BY_MEMORY:
            # Of a copy it would read the copy's memory, and here there are no copies.
            raise NotAViewError(f"{func} reads memory, not elements")
        if func not in _UNTOLD:
            told = [repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
            self.operations.append(f"{func}({', '.join(told)})")
        if func in _COPIES and self._is_plain_copy(args[0], kwargs):
            return _ATEN.alias.default(args[0])
        if self._strict and all(result.alias_info is None for result in func._schema.returns):
            raise NotAViewError(f"{func} computes with the tensor")
        return func(*args, **kwargs)

    def _touches(self, tensor: torch.Tensor) -> bool:
        return bool(tensor.untyped_storage()._cdata == self._whole.untyped_storage()._cdata)

    def _is_plain_copy(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        return dtype in (None, tensor.dtype) and device in (None, tensor.device)


def box_of(view: torch.Tensor, shape: tuple[int, ...]) -> tuple[Region, tuple[int, ...]]:
    """The box of a contiguous tensor of `shape` that `view`, a view of it, shows, and which of its dims in which order.

    Dims left out have extent 1 in the box. Raises ValueError saying why where the view is no such box.
    """
    if 0 in shape or view.numel() == 0:
        if tuple(view.shape) == shape:
            return Region.whole(shape), tuple(range(len(shape)))
        raise ValueError("an empty tensor in another shape")
    # steps[d]: elements between neighbours along dim d of a contiguous tensor; they differ where extents exceed 1.
    steps = [*accumulate(reversed(shape[1:]), mul, initial=1)][::-1] if shape else []
    by_step = {step: dim for dim, (step, size) in enumerate(zip(steps, shape, strict=True)) if size > 1}
    extent = [1] * len(shape)
    dims: list[int | None] = []
    for size, step in zip(view.shape, view.stride(), strict=True):
        dim = by_step.get(step) if size > 1 else None
        if size > 1 and (dim is None or dim in dims):
            raise ValueError(f"elements {step} apart along a dim of {size} are not neighbours along one dim")
        if dim is not None:
            extent[dim] = size
        dims.append(dim)
    spare = iter([dim for dim in range(len(shape)) if dim not in dims])
    ordered = [next(spare, -1) if dim is None else dim for dim in dims]
    if -1 in ordered:
        raise ValueError(f"it has {view.ndim} dims, more than the tensor's {len(shape)}")
    rest, offset = int(view.storage_offset()), []
    for step in steps:
        start, rest = divmod(rest, step)
        offset.append(start)
    box = Region(tuple(offset), tuple(extent))
    if any(stop > size for stop, size in zip(box.stop, shape, strict=True)):
        raise ValueError("it runs over the end of a dim into the next row")
    return box, tuple(ordered)
