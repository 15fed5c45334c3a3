"""Write JSON whose bytes depend on the values alone, and that is there whole or not at all."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_rl_reshard.errors import ConfigError


def rounded(value: float) -> float:
    """Twelve significant digits: enough for nanoseconds, and the same text on every machine."""
    return float(f"{value:.12g}")


def json_text(plain: Any) -> str:
    """Two-space indent, keys in the order given, one line feed at the end. NaN and infinity are refused."""
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def writable(path: Path | None) -> Path | None:
    """`path`, unless no file can be put there: said before the work is done, not after it. Raises ConfigError."""
    if path is None:
        return None
    place = path.resolve()  # a link stays a link: what it points to is written
    try:
        if place.exists() and not place.is_file():
            raise ConfigError(f"--json {path}: is no file that could be written anew")
        if not place.parent.is_dir():
            raise ConfigError(f"--json {path}: there is no folder {place.parent}")
    except OSError as fault:
        raise ConfigError(f"--json {path}: is no place for a file: {fault.strerror}") from fault
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--json {path}: the folder {place.parent} cannot be written to")
    return place


def write_json(path: Path, plain: Any) -> None:
    """Write `plain` to `path` through a neighbouring file, so that a reader never sees half of it.

    Raises ConfigError when that fails, and leaves nothing behind.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json_text(plain), encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as fault:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ConfigError(f"--json {path}: cannot be written: {fault.strerror}") from fault
