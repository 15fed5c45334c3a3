"""Tensors that an engine derives from its weights after loading, and the step that makes each of them anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch
from torch import nn

from nemo_rl_reshard.targets.vllm_layers import VllmLayers
from nemo_rl_reshard.targets.vllm_probe import copies_of_parameters

Hook = Callable[[nn.Module], None]


class DerivedCaches:
    """Finds what must be made anew after the weights changed, and does it, once per refit.

    Attention layers with a post-load step of their own (MLA absorbs `kv_b_proj`) are vLLM's; `hooks` adds a step per
    module class name for anything else.
    """

    def __init__(self, layers: VllmLayers, hooks: Mapping[str, Hook], dtype: torch.dtype) -> None:
        self._layers = layers
        self._dtype = dtype
        self._attention = [module for _, module in layers.items() if layers.names.is_deferred_attention(module)]
        self._hooked = [
            (module, hooks[type(module).__name__]) for _, module in layers.items() if type(module).__name__ in hooks
        ]

    def faults(self, processed: Set[str]) -> list[str]:
        """Layers that keep something derived which nothing would make anew; `processed` layers remake theirs."""
        hooked = {id(module) for module, _ in self._hooked}
        found = []
        for name, module in self._layers.items():
            if name in processed or id(module) in hooked or module in self._attention:
                continue
            kept = copies_of_parameters(module)
            if kept:
                found.append(
                    f"layer {name} ({type(module).__name__}) keeps {', '.join(kept)}, derived from its parameters; "
                    "register a hook that makes it anew"
                )
        for name, module in self._layers.items():
            projection = getattr(module, "kv_b_proj", None)
            weight = getattr(projection, "weight", None)
            if module in self._attention and isinstance(weight, torch.Tensor) and weight.numel() == 0:
                found.append(
                    f"layer {name}: the engine dropped kv_b_proj.weight after absorbing it, and absorbs it only once; "
                    "start the engine with an attention backend that keeps it"
                )
        return found

    def refresh(self) -> None:
        """Make everything derived anew, in place."""
        with self._layers.configured(), torch.no_grad():
            for module in self._attention:
                step = getattr(module, "process_weights_after_loading")  # noqa: B009
                step(self._dtype)
            for module, hook in self._hooked:
                hook(module)
