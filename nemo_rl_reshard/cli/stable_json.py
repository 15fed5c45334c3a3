"""Write JSON whose bytes depend on the values alone, and that is there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_rl_reshard.errors import ConfigError


def json_text(plain: Any) -> str:
    """Two-space indent, keys in the order given, one line feed at the end. NaN and infinity are refused."""
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, plain: Any) -> None:
    """Write `plain` to `path` through a neighbouring file, so that a reader never sees half of it.

    Raises ConfigError when the folder cannot be written to.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json_text(plain), encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as fault:
        raise ConfigError(f"--json {path}: cannot be written: {fault.strerror}") from fault
