"""A toy model that vLLM's own reload machinery accepts: real parameters, loaders and post-load steps, no engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.targets.vllm_compat import VllmNames, find_names
from nemo_rl_reshard.targets.vllm_target import VllmTarget


def vllm_names() -> VllmNames:
    """vLLM's names; importing it warns about other projects' habits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_names()


def post_load(names: VllmNames, step: Callable[[nn.Module], None]) -> Any:
    """A linear method of vLLM's whose post-load step is `step`; it multiplies with `weight`."""

    class Method(names.plain_linear):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.num_calls = 0

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            self.num_calls += 1
            step(layer)

        def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return x @ layer.weight.t()

    return Method()


class GateUp(nn.Module):
    """One fused weight [2 * rows, columns], gate above up, as the loader fills it."""

    def __init__(self, rows: int = 2, columns: int = 3, method: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * rows, columns), requires_grad=False)
        self.weight.weight_loader = self.load
        self.rows = rows
        if method is not None:
            self.quant_method = method

    def load(self, param: torch.Tensor, tensor: torch.Tensor, half: int) -> None:
        param.data.narrow(0, half * self.rows, self.rows).copy_(tensor)


class Plain(nn.Module):
    """One weight that nothing processes."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape), requires_grad=False)


class StubModel(nn.Module):
    """`mlp.gate` and `mlp.up` fill `mlp.weight`; every other tensor fills the parameter or buffer of its name."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        tensors = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        loaded = set()
        for name, tensor in weights:
            layer, _, part = name.rpartition(".")
            if part in ("gate", "up"):
                target = f"{layer}.weight"
                tensors[target].weight_loader(tensors[target], tensor, ("gate", "up").index(part))
            else:
                target = name
                tensors[target].data.copy_(tensor)
            loaded.add(target)
        return loaded


def started(model: nn.Module, names: VllmNames, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Load and process as vLLM does when it starts: note the layout, load, run every post-load step."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    model.load_weights(iter(weights.items()))
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, names.quantize_method):
            method.process_weights_after_loading(module)
    for module in model.modules():
        if names.is_deferred_attention(module):
            module.process_weights_after_loading(torch.float32)
    return model


def target_of(model: nn.Module, names: VllmNames, mode: str = "auto", **options: Any) -> VllmTarget:
    """A target on a toy model."""
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32, quantization=None))
    return VllmTarget(model, config, mode, names=names, **options)


def specs_of(weights: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """What a trainer that holds `weights` would declare."""
    return [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]


def write(target: VllmTarget, weights: Mapping[str, torch.Tensor]) -> None:
    """Write whole tensors on their routes, without finishing."""
    for name, tensor in weights.items():
        shards = target.trace.loader.shards_of(name)
        for shard in shards:
            target.view(name, shard.region).copy_(tensor[shard.region.slices])
        if shards:
            target.tensor_done(name)
        else:
            target.load([(name, tensor)])


def refit(target: VllmTarget, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """One whole refit of one rank."""
    target.begin(version)
    write(target, weights)
    target.finish(version)
