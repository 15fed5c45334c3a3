"""LoRA on linear layers: the merged value of any part of a base weight, without gathering that weight.

NeMo RL sends `W + B @ A * scale`, computed on the gathered W. Addition and scaling work element by element, and the
product needs only the two small factors. So each rank gathers A and B, multiplies them whole, exactly as NeMo RL does
(same shapes, dtype and kind of device, so the same kernel and the same bits), and adds the part that belongs to its own
shard of W. Training's own tensors are only read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nemo_rl_reshard.errors import DeclarationError, StateError
from nemo_rl_reshard.layout import Region

Shape = tuple[int, ...]
MERGED = "LoRA: its merged value is computed at every refit"
_MERGED_CLASS = "LinearLoRA"


@dataclass(frozen=True, slots=True)
class LowRank:
    """A LoRA layer: the names of its factors `down` [rank, in] and `up` [out, rank], and the module that holds them."""

    down: str
    up: str
    module: nn.Module

    @property
    def scale(self) -> float:
        """What the layer multiplies the product by, found where NeMo RL finds it."""
        scale = getattr(self.module, "scale", None)
        if scale is not None:
            return float(scale)
        if hasattr(self.module, "alpha") and hasattr(self.module, "dim"):
            return float(self.module.alpha) / float(self.module.dim)  # type: ignore[arg-type]
        return 1.0


def adapted(module: nn.Module, path: str) -> LowRank | str | None:
    """How the module at `path` (with its dot) is adapted: None if it is not, a reason if it cannot be merged.

    A layer that keeps its own weight beside `lora_A` and `lora_B` can, if it is of the class that NeMo RL merges.
    """
    kind = type(module).__name__
    owned = sorted(leaf for leaf in module._parameters if leaf.startswith("lora_"))
    if owned:
        names = ", ".join(path + leaf for leaf in owned)
        return (
            f"{kind} holds {names}: LoRA of grouped experts and DoRA are not merged; leave the module out of lora_cfg"
        )
    factors = [getattr(module, name, None) for name in ("lora_A", "lora_B")]
    own = "weight" in module._parameters and not hasattr(module, "base_layer")
    if not own or not any(isinstance(factor, nn.Module) for factor in factors):
        return None
    weights = [getattr(factor, "weight", None) for factor in factors]
    if _MERGED_CLASS not in {base.__name__ for base in type(module).__mro__}:
        return f"{kind} holds {path}lora_A and {path}lora_B and is no {_MERGED_CLASS}: how to merge it is not known"
    if not all(isinstance(weight, torch.Tensor) and weight.ndim == 2 for weight in weights):
        return f"{kind} holds no {path}lora_A.weight and {path}lora_B.weight of two dims"
    if getattr(module, "quant_state", None) is not None or not module.weight.is_floating_point():  # type: ignore[operator]
        return f"{kind} adapts a quantised weight: its merged value is not defined"
    return LowRank(f"{path}lora_A.weight", f"{path}lora_B.weight", module)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of `tensor`. Collective over its mesh, so every rank of it must call this in the same order.

    An offloaded shard travels from its mesh's kind of device, as NeMo RL moves it there before it gathers. Bounded by
    the timeout of the trainers' own process groups.
    """
    with torch.no_grad():
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        device = tensor.device_mesh.device_type
        placed = tensor if tensor.device.type == device else tensor.to(device)
        whole: torch.Tensor = placed.full_tensor()  # type: ignore[attr-defined]
        return whole


class Merges:
    """The LoRA layers of a source by the name of their base weight; holds factors between `gather` and `release`."""

    def __init__(self) -> None:
        self._layers: dict[str, LowRank] = {}
        self._factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._latest: tuple[str, torch.dtype, torch.Tensor] | None = None

    def __contains__(self, weight: object) -> bool:
        return weight in self._layers

    def add(self, weight: str, layer: LowRank, whole: Shape, down: Shape, up: Shape) -> None:
        """Note a layer, given the shapes of weight and factors. Raises DeclarationError where they do not fit."""
        if len(whole) != 2 or (up[0], down[1]) != whole or up[1] != down[0]:
            raise DeclarationError(f"{weight} {whole}: LoRA factors {layer.down} {down} and {layer.up} {up} do not fit")
        self._layers[weight] = layer

    def gather(self, whole_of: Callable[[str], torch.Tensor]) -> None:
        """Take all factors, in order of the layers; collective if `whole_of` is."""
        self._latest = None
        self._factors = {weight: (whole_of(layer.down), whole_of(layer.up)) for weight, layer in self._layers.items()}

    def release(self) -> None:
        """Drop the factors, and the product."""
        self._factors = {}
        self._latest = None

    def merged(self, weight: str, stored: torch.Tensor, region: Region) -> torch.Tensor:
        """The merged value of `region` of `weight`, whose base value is `stored`; a new tensor beside it.

        Raises StateError outside `gather` and `release`.
        """
        if weight not in self._factors:
            raise StateError(f"{weight}: its LoRA factors are gathered at the start of a refit, and none is under way")
        change = self._change(weight, stored)
        return stored + change[region.slices].to(stored.device)

    def _change(self, weight: str, stored: torch.Tensor) -> torch.Tensor:
        """What is added to the whole of `weight`. Kept for one layer, whose parts are asked for one after the other."""
        if self._latest is None or self._latest[:2] != (weight, stored.dtype):
            down, up = self._factors[weight]
            if down.device.type == "cpu":
                down = down.to(stored.device)
            down, up = (factor.to(device=down.device, dtype=stored.dtype) for factor in (down, up))
            self._latest = weight, stored.dtype, torch.matmul(up, down) * self._layers[weight].scale
        return self._latest[2]
