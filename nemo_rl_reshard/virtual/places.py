"""Place: where in a model a checkpoint tensor belongs, read from its name: layer, expert, and what is left over."""

from __future__ import annotations

import re
from typing import NamedTuple

_LAYER = re.compile(r"(?:[^.]+\.)*?(?:layers|h|blocks)\.(\d+)\.(.+)")
_TRUNK = re.compile(r"^(?:model\.language_model|language_model\.model|model|backbone)\.")


class Place(NamedTuple):
    """`layer` is None outside layers, `expert` outside routed experts; `part` is the name without these numbers."""

    layer: int | None
    expert: int | None
    part: str

    @classmethod
    def of(cls, name: str) -> Place:
        """Read a checkpoint name: `model.layers.3.mlp.experts.7.up_proj.weight` is layer 3, expert 7."""
        found = _LAYER.fullmatch(name)
        if found is None:
            return cls(None, None, _TRUNK.sub("", name))
        layer, rest = int(found[1]), found[2]
        path, inside, below = rest.partition(".experts.")
        number, _, leaf = below.partition(".")
        if not inside or not number.isdigit():
            return cls(layer, None, rest)
        return cls(layer, int(number), f"{path}.experts.{leaf}")
