"""Place: where in a model a checkpoint tensor belongs, read from its name: layer, expert, and what is left over."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks)\.(\d+)\.(.+)$")
_TRUNK = re.compile(r"^(?:model\.language_model|language_model\.model|model|backbone)\.")
_EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Place:
    """`layer` is None outside layers, `expert` outside routed experts; `part` is the name without these numbers."""

    layer: int | None
    expert: int | None
    part: str

    @classmethod
    def of(cls, name: str) -> Place:
        """Read a checkpoint name: `model.layers.3.mlp.experts.7.up_proj.weight` is layer 3, expert 7."""
        found = _LAYER.match(name)
        if found is None:
            return cls(None, None, _TRUNK.sub("", name))
        layer, rest = int(found[1]), found[2]
        expert = _EXPERT.match(rest)
        if expert is None:
            return cls(layer, None, rest)
        return cls(layer, int(expert[2]), f"{expert[1]}.{expert[3]}")
