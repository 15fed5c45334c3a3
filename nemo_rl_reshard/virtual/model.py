"""ModelShape: a model as names, shapes and the few numbers of its configuration that layouts depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.params.spec import TensorSpec


@dataclass(frozen=True)
class ModelShape:
    """`specs` in model order under checkpoint names, experts one by one; `config` as plain values.

    `assumptions` are sentences about what is guessed; a model whose configuration is public has none.
    """

    name: str
    architecture: str
    specs: tuple[TensorSpec, ...]
    config: Mapping[str, Any]
    assumptions: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole model on the wire."""
        return sum(spec.nbytes for spec in self.specs)

    def number(self, *keys: str) -> int:
        """The first of `keys` that the configuration gives as a positive number. Raises ConfigError if none does."""
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise ConfigError(f"model {self.name}: its configuration gives no {' or '.join(keys)}")
