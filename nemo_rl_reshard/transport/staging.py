"""Staging: a bounded set of byte slots, allocated once, and the packing of strided views into bytes and out again.

Fresh buffers cost as much as the wire (page faults), so slots are touched when they are allocated and then reused.
Packing casts to the wire dtype in the same pass. A view that already is what travels needs no slot: see `is_plain`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_rl_reshard.errors import TransportError

_SLOT_ALIGNMENT = 64
"""Bytes. A slot starts on a cache line, so that any dtype can be viewed from its start."""


class StagingSlots:
    """`num_slots` slots of `slot_bytes` in one allocation that lasts as long as this object. For one thread."""

    def __init__(
        self, num_slots: int, slot_bytes: int, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> None:
        """Allocate, and touch every page. Slots of host memory that a GPU copies from or to are to be `pinned`.

        `slot_bytes` is 0 when nothing has to be staged. Raises ValueError for no slots or a negative size.
        """
        if num_slots < 1 or slot_bytes < 0:
            raise ValueError(f"staging needs at least one slot, not {num_slots} of {slot_bytes} bytes")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._pitch = -(-slot_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        self._memory = torch.zeros(num_slots * self._pitch, dtype=torch.uint8, device=device, pin_memory=pinned)
        self._twin: Tensor | None = None
        self._free = list(reversed(range(num_slots)))

    @property
    def nbytes(self) -> int:
        """Bytes allocated, on the device and as twins."""
        return self._memory.numel() * (1 if self._twin is None else 2)

    @property
    def has_free(self) -> bool:
        """Whether a slot can be taken now."""
        return bool(self._free)

    def take(self, nbytes: int) -> tuple[int, Tensor]:
        """A free slot, and its first `nbytes` bytes as 1-D uint8, which hold whatever was there.

        Raises TransportError if the slot is too short or none is free: finish a message before the next.
        """
        if nbytes > self.slot_bytes:
            raise TransportError(f"a message of {nbytes} bytes does not fit a staging slot of {self.slot_bytes}")
        if not self._free:
            raise TransportError(f"all {self.num_slots} staging slots are taken; finish a message before the next")
        slot = self._free.pop()
        return slot, self._bytes_of(self._memory, slot, nbytes)

    def host_twin(self, slot: int, nbytes: int) -> Tensor:
        """The first `nbytes` bytes of pinned host memory that belongs to the taken `slot` on a GPU, for as long.

        What is copied from there to the slot is out of it when the slot is given back, since the slot was used.
        """
        if self._twin is None:
            self._twin = torch.zeros(self._memory.numel(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._bytes_of(self._twin, slot, nbytes)

    def give_back(self, slot: int) -> None:
        """Free `slot`: nothing refers to its bytes any more. Raises TransportError if it is not taken."""
        if not 0 <= slot < self.num_slots or slot in self._free:
            raise TransportError(f"staging slot {slot} is not taken, so it cannot be given back")
        self._free.append(slot)

    def _bytes_of(self, memory: Tensor, slot: int, nbytes: int) -> Tensor:
        return memory[slot * self._pitch : slot * self._pitch + nbytes]


def is_plain(view: Tensor, dtype: torch.dtype) -> bool:
    """True if the memory of `view` is, byte for byte, what travels as `dtype`: no cast and no strides."""
    return view.dtype == dtype and view.is_contiguous()


def wire_bytes(view: Tensor) -> Tensor:
    """The bytes of a contiguous `view` as a 1-D uint8 view of the same memory.

    It starts at the view's own first element, wherever that lies in its storage, and is as long as the view, however
    long the storage. Raises TransportError for a strided view.
    """
    if not view.is_contiguous():
        raise TransportError(
            f"a view of shape {tuple(view.shape)} and strides {view.stride()} must be packed to travel"
        )
    # Not view(-1): one element counts as contiguous with any stride and keeps it, and torch reads no bytes from that.
    return view.detach().as_strided((view.numel(),), (1,)).view(torch.uint8)


def pack(view: Tensor, buffer: Tensor, dtype: torch.dtype) -> None:
    """Fill `buffer`, 1-D uint8, with the elements of `view` in row-major order, cast to `dtype` (nearest even).

    `view` may be strided in any way. Between devices the copy is only started: see StreamOrder.settle. Raises
    TransportError unless `buffer` has exactly the bytes that it takes.
    """
    _check_length(view, buffer, dtype)
    if _is_aligned(buffer, dtype):
        buffer.view(dtype).view(view.shape).copy_(view.detach(), non_blocking=True)
    else:
        buffer.copy_(wire_bytes(view.detach().to(dtype).contiguous()), non_blocking=True)


def unpack(buffer: Tensor, view: Tensor, dtype: torch.dtype) -> None:
    """Fill `view`, strided in any way, from what `pack` left in `buffer`; what the view skips keeps its values.

    Between devices the copy is only started: see StreamOrder.settle. Raises TransportError unless `buffer` has exactly
    the bytes that `view` takes as `dtype`.
    """
    _check_length(view, buffer, dtype)
    aligned = buffer if _is_aligned(buffer, dtype) else buffer.clone()
    view.detach().copy_(aligned.view(dtype).view(view.shape), non_blocking=True)


def _is_aligned(buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch can read `buffer` as `dtype`. It cannot behind an odd number of narrower elements; that is rare
    enough (tensors of several dtypes in one message) for a temporary copy."""
    return buffer.storage_offset() % dtype.itemsize == 0


def _check_length(view: Tensor, buffer: Tensor, dtype: torch.dtype) -> None:
    if buffer.numel() != view.numel() * dtype.itemsize:
        needed = view.numel() * dtype.itemsize
        raise TransportError(f"{tuple(view.shape)} as {dtype} takes {needed} bytes, the buffer has {buffer.numel()}")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a spec or a part names."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
