"""Read the keys of a NeMo RL configuration, be it a MasterConfig, an OmegaConf container or plain mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Settings:
    """Read-only view of one configuration; a key that is not there reads as None, as most keys of NeMo RL default.

    Only what is asked for is touched: other parts of the configuration may hold objects that cannot be copied.
    """

    def __init__(self, config: object) -> None:
        self._config = config

    def at(self, path: str) -> Any:
        """The plain value under a dotted path, or None if any step of it is absent or null."""
        found: object = self._config
        for step in path.split("."):
            found = _member(found, step)
            if found is None:
                return None
        return plain(found)

    def on(self, path: str) -> bool:
        """Whether the switch under a dotted path is on; absent is off."""
        return bool(self.at(path))

    def keys(self) -> Iterator[str]:
        """The top-level keys, extra ones included."""
        return iter(_keys(self._config))


def plain(value: object) -> Any:
    """`value` with mappings, sequences and pydantic models below it turned to dicts, lists and dicts."""
    if isinstance(value, Mapping) or hasattr(value, "model_fields_set"):
        return {key: plain(_member(value, key)) for key in _keys(value)}
    # OmegaConf's lists are sequences by structure only.
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ListConfig":
        return [plain(item) for item in value]  # type: ignore[attr-defined]
    return value


def _keys(holder: object) -> list[str]:
    if isinstance(holder, Mapping):
        return list(holder)
    return [*type(holder).model_fields, *(getattr(holder, "model_extra", None) or {})]  # type: ignore[attr-defined]


def _member(holder: object, key: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(key)
    return getattr(holder, key, None)
