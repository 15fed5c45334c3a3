"""Proofs that writing into a layer's live storage is the same as loading it: by experiment, not by class name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nemo_rl_reshard.targets.vllm_layers import Layout, VllmLayers, forget_kernel, processing_of

_CODES = 251  # a prime below 256: bfloat16 holds these integers exactly, and no power-of-two block repeats them


def why_not_live(layers: VllmLayers, layer: str, load_time: Mapping[str, Layout]) -> str | None:
    """None if the live tensors of `layer` may be written in place, else the reason why not.

    `load_time` gives the loader's layout of each tensor of the layer, by its short name. Live means: same shape,
    stride and dtype, the loader still attached, and what is written there is what the kernel computes with. Leaves
    every tensor and attribute as it was.
    """
    module = layers.module(layer)
    kernel = experts_kernel(module)
    reason = _why_not_live(layers, layer, load_time)
    return f"{kernel}: {reason}" if reason and kernel else reason


def _why_not_live(layers: VllmLayers, layer: str, load_time: Mapping[str, Layout]) -> str | None:
    module = layers.module(layer)
    for name, layout in load_time.items():
        reason = _differs(getattr(module, name, None), name, layout)
        if reason is not None:
            return reason
    if processing_of(module, layers.names) is None:
        return None
    reason = _probe_processing(layers, layer, load_time)
    weight = getattr(module, "weight", None)
    plain = isinstance(module.quant_method, (layers.names.plain_linear, layers.names.plain_embedding))
    if reason is None and plain and isinstance(weight, torch.Tensor) and weight.ndim == 2:
        reason = _probe_matmul(layers, module, weight)
    return reason


def experts_kernel(module: nn.Module) -> str:
    """Which MoE kernel a layer computes with, for reports; empty for other layers."""
    kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if experts is None:
        return ""
    isa = getattr(experts, "isa", "")
    return f"{type(experts).__name__}({isa})" if isa else type(experts).__name__


def _differs(live: torch.Tensor | None, name: str, layout: Layout) -> str | None:
    if live is None:
        return f"{name} does not exist after loading"
    found = Layout.of(live)
    if found.shape != layout.shape:
        return f"{name} has shape {list(found.shape)} after loading and {list(layout.shape)} before: it is packed"
    if found.stride != layout.stride:
        return f"{name} has stride {list(found.stride)} after loading and {list(layout.stride)} before"
    if found.dtype != layout.dtype:
        return f"{name} is {found.dtype} after loading and {layout.dtype} before"
    if layout.has_loader and not found.has_loader:
        return f"{name} lost its weight loader after loading"
    return None


def copies_of_parameters(module: nn.Module) -> list[str]:
    """Names of tensors outside the checkpoint that look derived from a parameter of the same module.

    Such a tensor is floating point, has as many elements as one of the parameters, and its own storage.
    """
    parameters = [tensor for tensor in module.parameters(recurse=False) if tensor.numel() > 1]
    sizes = {tensor.numel() for tensor in parameters}
    owned = {tensor.untyped_storage().data_ptr() for tensor in parameters}
    hidden = {name: module._buffers[name] for name in module._non_persistent_buffers_set if name in module._buffers}
    hidden.update({name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)})
    return [
        name
        for name, tensor in hidden.items()
        if tensor is not None
        and tensor.is_floating_point()
        and tensor.numel() in sizes
        and tensor.untyped_storage().data_ptr() not in owned
    ]


def _probe_matmul(layers: VllmLayers, module: nn.Module, weight: torch.Tensor) -> str | None:
    """Write codes into one column; a product with that unit vector must return them, or the kernel reads a copy."""
    rows, columns = weight.shape
    codes = (torch.arange(rows, device=weight.device) % _CODES).to(weight.dtype)
    data = weight.detach()
    method: Any = module.quant_method
    with layers.configured(), torch.no_grad():
        for column in sorted({0, columns - 1}):
            unit = torch.zeros(1, columns, dtype=weight.dtype, device=weight.device)
            unit[0, column] = 1
            before = data[:, column].clone()
            data[:, column].copy_(codes)
            try:
                product = method.apply(module, unit, None)
            finally:
                data[:, column].copy_(before)
            if not torch.equal(product.reshape(-1)[:rows], codes):
                return "the matmul computes with a packed copy of weight"
    return None


def _probe_processing(layers: VllmLayers, layer: str, load_time: Mapping[str, Layout]) -> str | None:
    """Load codes, run the layer's own processing, and look whether they stay where they are."""
    with layers.scratch(layer) as module, layers.configured(), torch.no_grad():
        expected = {}
        for name, layout in load_time.items():
            if name in layers.names.never_parked:
                continue
            tensor = getattr(module, name)
            codes = (torch.arange(tensor.numel(), device=tensor.device) % _CODES).to(layout.dtype).view(layout.shape)
            tensor.data.copy_(codes)
            expected[name] = codes
        step = processing_of(module, layers.names)
        forget_kernel(module, layers.names)
        if step is not None:
            step(module)
        moved = [name for name, codes in expected.items() if not _holds(getattr(module, name, None), codes)]
        if moved:
            return f"processing after loading rearranges {', '.join(moved)}"
        kept = copies_of_parameters(module)
        return f"{type(module).__name__} keeps {', '.join(kept)} beside its parameters" if kept else None


def _holds(tensor: torch.Tensor | None, codes: torch.Tensor) -> bool:
    return tensor is not None and tensor.shape == codes.shape and torch.equal(tensor, codes)
