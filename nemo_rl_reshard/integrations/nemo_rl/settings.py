"""Read the keys of a NeMo RL configuration, be it a MasterConfig, an OmegaConf container or plain mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel


class Settings:
    """Read-only view of one configuration; a key that is not there reads as None, as most keys of NeMo RL default.

    Only what is asked for is touched: other parts of the configuration may hold objects that cannot be copied.
    """

    def __init__(self, config: object, read: Mapping[str, object] | None = None) -> None:
        """`read` stands for top-level keys that were read already, with their defaults filled in."""
        self._config = config
        self._read = read or {}

    def at(self, path: str) -> Any:
        """The plain value under a dotted path, or None if any step of it is absent or null."""
        first, *rest = path.split(".")
        found = self._read[first] if first in self._read else _member(self._config, first)
        for step in rest:
            found = _member(found, step)
        return plain(found)

    def keys(self) -> list[str]:
        """The top-level keys, extra ones included."""
        return _keys(self._config)


def plain(value: object) -> Any:
    """`value` with mappings and pydantic models turned to dicts and sequences to lists, all the way down."""
    if isinstance(value, Mapping | BaseModel):
        return {key: plain(_member(value, key)) for key in _keys(value)}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _keys(holder: object) -> list[str]:
    if isinstance(holder, BaseModel):
        return [*type(holder).model_fields, *(holder.model_extra or {})]
    return list(holder) if isinstance(holder, Mapping) else []


def _member(holder: object, key: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(key)
    return getattr(holder, key, None) if isinstance(holder, BaseModel) else None
