"""Tell a NeMo RL recipe from a configuration of the CPU loop, before anything of NeMo RL is imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = "${oc.env:NEMO_RL"
"""How a recipe's `defaults` begin where they name a file of NeMo RL's checkout."""
MARKS = (
    ("policy", "model_name"),
    ("policy", "dtensor_cfg"),
    ("policy", "megatron_cfg"),
    ("policy", "generation"),
    ("cluster", "gpus_per_node"),
)
"""Keys that NeMo RL has and the CPU loop has not."""


def is_recipe(path: Path) -> bool:
    """Whether the file, or one that it inherits, inherits a file of NeMo RL or has a section of NeMo RL's form.

    Files that cannot be read are no recipe: the CPU loop's reader says what is wrong with them.
    """
    return any(_is_one(config) for config in _chain(path, set()))


def _is_one(config: dict[str, Any]) -> bool:
    if any(CHECKOUT in name for name in _inherited(config)):
        return True
    return any(isinstance(config.get(section), dict) and key in config[section] for section, key in MARKS)


def _chain(path: Path, seen: set[Path]) -> Iterator[dict[str, Any]]:
    """The file's mapping as written, then those of the files it inherits, as far as they can be read."""
    path = path.resolve()
    if path in seen:
        return
    seen.add(path)
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return
    if not isinstance(config, dict):
        return
    yield config
    for name in _inherited(config):
        yield from _chain(path.parent / name, seen)


def _inherited(config: dict[str, Any]) -> list[str]:
    names = config.get("defaults", [])
    return [str(name) for name in names] if isinstance(names, list) else [str(names)]
