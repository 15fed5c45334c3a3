"""Shared: what all ranks are told alike in one operation, sent through Ray's object store once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import ray
from ray import ObjectRef


class Shared:
    """JSON types under names; a rank finds them among its own arguments.

    A member whose call takes `reference` as an argument of its own has Ray fetch it once per host. Nested in others it
    would arrive as a reference, so members whose call has no such place send `value`.
    """

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.value = dict(value)

    @cached_property
    def reference(self) -> ObjectRef[Any]:
        """The value in the object store; put there when first asked for, and dropped with this object."""
        return ray.put(self.value)
