"""TensorSpec: one checkpoint tensor, under the name the engine's loader accepts: global shape and wire dtype."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.params.dtype import ITEM_SIZE


@dataclass(frozen=True, slots=True, order=True)
class TensorSpec:
    """`shape` is the whole tensor's; `dtype` is what travels, named as torch names it without the `torch.` prefix."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZE:
            raise DeclarationError(f"{self.name}: unknown dtype {self.dtype!r}; known are {', '.join(ITEM_SIZE)}")

    @property
    def item_size(self) -> int:
        """Bytes per element on the wire."""
        return ITEM_SIZE[self.dtype]

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor on the wire."""
        return self.numel * self.item_size
