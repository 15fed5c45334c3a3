"""Wire dtypes by name, as plain strings, so that plans and manifests stay free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ITEM_SIZE: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
    }
)
"""Bytes per element of every dtype that can travel, under torch's names."""
