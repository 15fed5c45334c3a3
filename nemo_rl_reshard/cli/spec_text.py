"""Read YAML or JSON as plain values, refusing what both would pass over in silence: a key given twice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from nemo_rl_reshard.errors import ConfigError

# libyaml's parser, where it is there, is ten times as fast on the large specs.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


_LARGEST = (1 << 63) - 1


class _Loader(_SafeLoader):  # type: ignore[misc]
    """SafeLoader that notes repeated keys, and refuses whole numbers of more than 64 bits."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.repeated: list[str] = []
        # Inner values first: an alias inside its own anchor is then an error, not a list without end.
        self.deep_construct = True

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        """An int, in any of YAML's notations."""
        return _bounded(self.construct_yaml_int(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    self.repeated.append(f"line {key.start_mark.line + 1}: key {key.value!r} is given twice")
                seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_whole)


def read_plain(path: Path) -> tuple[Any, list[str]]:
    """The file's content as plain values, and the faults found on the way (repeated keys).

    Raises ConfigError when the file cannot be read or is neither YAML nor JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as fault:
        raise ConfigError(f"{path}: cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise ConfigError(f"{path}: is not UTF-8 text: {fault}") from fault
    if path.suffix == ".json":
        return _read_json(path, text)
    loader = _Loader(text)
    try:
        return loader.get_single_data(), loader.repeated
    # Explicit tags (`!!int abc`) lead any text to PyYAML's converters, which raise whatever comes of it.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as fault:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(fault).split())}") from fault
    finally:
        loader.dispose()


def _read_json(path: Path, text: str) -> tuple[Any, list[str]]:
    repeated: list[str] = []

    def gather(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        gathered: dict[str, Any] = {}
        for key, value in pairs:
            if key in gathered:
                repeated.append(f"key {key!r} is given twice")
            gathered[key] = value
        return gathered

    try:
        return json.loads(text, object_pairs_hook=gather, parse_int=lambda digits: _bounded(int(digits))), repeated
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: is not JSON: {fault}") from fault


def _bounded(value: int) -> int:
    """`value`, unless it is larger than anything a spec can mean: sizes are 64-bit numbers further on."""
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"a whole number of {value.bit_length()} bits is larger than any size or rank")
    return value
