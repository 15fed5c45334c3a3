"""Values that say which tensor, which element and which round they belong to, in any dtype that travels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nemo_rl_reshard.layout import Region

Bits = npt.NDArray[np.uint64]

_CARRIER = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_FLOAT_BITS = {"float16": (10, 5), "bfloat16": (7, 8), "float32": (23, 8), "float64": (52, 11)}
"""Bits of mantissa and of exponent."""


def position_code(tensor: int, shape: tuple[int, ...], region: Region, dtype: str, turn: int) -> Tensor:
    """Elements of `region` of tensor number `tensor`, hashed from tensor, place in `shape` and `turn`.

    Floats are finite and normal, so that comparing bytes compares values.
    """
    places: Bits = np.zeros(region.extent, dtype=np.uint64)
    step = 1
    for dim in reversed(range(len(shape))):
        along = (region.offset[dim] + np.arange(region.extent[dim], dtype=np.uint64)) * np.uint64(step)
        places += along.reshape([-1 if other == dim else 1 for other in range(len(shape))])
        step *= shape[dim]
    # Flat, since numpy turns a scalar's wrap-around into a warning.
    bits = _mixed(places.reshape(-1) + np.uint64((tensor + 1) << 40) + np.uint64(turn << 56))
    if dtype == "bool":
        return torch.from_numpy((bits & np.uint64(1)).astype(np.bool_)).view(region.extent)
    kind = getattr(torch, dtype)
    if dtype in _FLOAT_BITS:
        bits = _normal(bits, *_FLOAT_BITS[dtype])
    carried = bits.astype(_CARRIER[kind.itemsize])
    flat = torch.from_numpy(carried.view(np.uint8).copy())
    return flat.view(kind).view(region.extent)


def _mixed(values: Bits) -> Bits:
    """splitmix64: every bit of the result depends on every bit of the value."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Bits = values ^ (values >> np.uint64(31))
    return mixed


def _normal(bits: Bits, mantissa: int, exponent: int) -> Bits:
    """Sign, mantissa and most of the exponent from `bits`, the exponent kept in the middle half of its range."""
    middle = np.uint64(1 << (exponent - 2))
    kept = (bits >> np.uint64(mantissa)) & np.uint64((1 << (exponent - 1)) - 1)
    fraction = bits & np.uint64((1 << mantissa) - 1)
    sign = (bits >> np.uint64(63)) << np.uint64(mantissa + exponent)
    value: Bits = fraction | ((middle + kept) << np.uint64(mantissa)) | sign
    return value
