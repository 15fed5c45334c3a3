"""Checks that an engine can take a refit at all: unquantised, awake, its tensors and experts where they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nemo_rl_reshard.errors import FaultList, TargetError
from nemo_rl_reshard.params.dtype import ITEM_SIZE
from nemo_rl_reshard.targets.vllm_layers import VllmLayers


def refuse_quantised(layers: VllmLayers, vllm_config: Any) -> None:
    """Raise TargetError naming each layer with a quantised method, or each parameter of a dtype that cannot travel."""
    faults = FaultList("quantised engines are not supported", TargetError)
    scheme = getattr(vllm_config.model_config, "quantization", None)
    if scheme is not None:
        faults.add(f"the engine was started with quantization={scheme}; start it without")
    names = layers.names
    plain = (names.plain_linear, names.plain_embedding, names.plain_experts)
    for layer, module in layers.items():
        method = getattr(module, "quant_method", None)
        parameters = dict(module.named_parameters(recurse=False))
        if parameters and isinstance(method, names.quantize_method) and not isinstance(method, plain):
            found = ", ".join(f"{name} ({tensor.dtype})" for name, tensor in parameters.items())
            faults.add(f"layer {layer}: {type(method).__name__} holds {found}")
            continue
        faults.extend(
            f"parameter {layer}.{name} is {tensor.dtype}"
            for name, tensor in parameters.items()
            if str(tensor.dtype).removeprefix("torch.") not in ITEM_SIZE
        )
    faults.raise_if_any()


def weights_in_place(model: nn.Module, asleep: bool) -> None:
    """Raise TargetError if the engine sleeps, or a parameter has lost its memory (sleep that throws weights away)."""
    if asleep:
        raise TargetError("the engine is asleep: wake it up before a refit")
    lost = [
        name
        for name, tensor in model.named_parameters()
        if tensor.numel() and (tensor.is_meta or tensor.untyped_storage().nbytes() == 0)
    ]
    if lost:
        raise TargetError(f"{len(lost)} parameters have no memory, {lost[0]} first: wake the engine up before a refit")


class Placement:
    """Where an engine keeps its tensors, their loaders and its experts, noted at set-up and compared afterwards.

    Captured graphs and kernels hold addresses, and the next refit needs the loaders, so a refit must leave both.
    """

    def __init__(self, layers: VllmLayers) -> None:
        self._layers = layers
        self._tensors = {name: (id(tensor), tensor.data_ptr()) for name, tensor in self._named()}
        self._loadable = {name for name, tensor in self._named() if hasattr(tensor, "weight_loader")}
        self._maps = {name: tensor.clone() for name, tensor in self._expert_maps().items()}

    def changes(self) -> list[str]:
        """One sentence for every parameter or buffer that moved since set-up, or lost its loader."""
        now = dict(self._named())
        moved = [
            f"{name} moved in memory during the refit; captured graphs would read the old place"
            for name, place in self._tensors.items()
            if name not in now or (id(now[name]), now[name].data_ptr()) != place
        ]
        bare = [
            f"{name} lost its weight loader during the refit; the next refit could not load it"
            for name in sorted(self._loadable & now.keys())
            if not hasattr(now[name], "weight_loader")
        ]
        return moved + bare

    def check_experts(self) -> None:
        """Raise TargetError if the engine has placed its experts anew since set-up."""
        now = self._expert_maps()
        faults = FaultList("experts have moved since set-up; declare again", TargetError)
        faults.extend(name for name, tensor in self._maps.items() if not torch.equal(now[name], tensor))
        faults.raise_if_any()

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._layers.model.named_parameters(remove_duplicate=False)
        yield from self._layers.model.named_buffers(remove_duplicate=False)

    def _expert_maps(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, module in self._layers.items():
            expert_map = getattr(module, "expert_map", None)
            if isinstance(expert_map, torch.Tensor):
                found[f"{name}.expert_map"] = expert_map
        return found
