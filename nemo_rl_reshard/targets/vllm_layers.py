"""One model's layers between two layouts: as the loader fills them, and as the engine computes with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.targets.loader_trace import LoaderTrace
from nemo_rl_reshard.targets.vllm_compat import VllmNames


@dataclass(frozen=True, slots=True)
class Layout:
    """Load-time layout of one tensor: what a loader sees."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    has_loader: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Read it off a tensor, on any device."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, hasattr(tensor, "weight_loader"))


@dataclass(frozen=True, slots=True)
class Parked:
    """The model with every layer at its load-time layout, on the meta device.

    `destinations`: parameters and buffers by first name. `aliases`: further names of a tied parameter -> its first.
    `parameters`: the first names of parameters with at least one element. `converted`: tensors that never leave
    their live layout and whose dtype the engine changed after loading -> the dtype they were loaded in.
    """

    destinations: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    parameters: tuple[str, ...]
    converted: Mapping[str, torch.dtype]


class VllmLayers:
    """Moves layers of `model` between the two layouts. The tensors that the engine computes with never move.

    A layer (a module with parameters or buffers of its own) is open while its load-time layout is in place.
    """

    def __init__(self, model: nn.Module, vllm_config: Any, names: VllmNames) -> None:
        self.model = model
        self.names = names
        self._vllm_config = vllm_config
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._open: dict[str, nn.Module] = {}
        self._unsaved = {module: frozenset(module._non_persistent_buffers_set) for module in model.modules()}

    @property
    def open_layers(self) -> tuple[str, ...]:
        """Layers that are open now, in the order they were opened."""
        return tuple(self._open)

    @property
    def open_nbytes(self) -> int:
        """Bytes of the load-time tensors of all open layers."""
        return sum(tensor.nbytes for module in self._open.values() for tensor in module.parameters(recurse=False))

    def module(self, layer: str) -> nn.Module:
        """The module called `layer`."""
        found: nn.Module = self._modules[layer]
        return found

    def items(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of every module, each module once."""
        yield from self.model.named_modules()

    def tensor(self, storage: str) -> torch.Tensor:
        """The tensor now registered under the full name `storage`."""
        layer, _, name = storage.rpartition(".")
        tensor: torch.Tensor = getattr(self._modules[layer], name)
        return tensor

    def configured(self) -> AbstractContextManager[Any]:
        """vLLM's current-config context; its loaders and processing steps read the configuration from it."""
        context: AbstractContextManager[Any] = self.names.current_config(self._vllm_config)
        return context

    @contextmanager
    def parked(self) -> Iterator[Parked]:
        """Every layer at its load-time layout on the meta device; the live tensors come back untouched on exit."""
        first: dict[int, tuple[nn.Module, str]] = {}
        shared: list[tuple[nn.Module, str, nn.Module, str]] = []
        for module in self.model.modules():
            for name, tensor in module.named_parameters(recurse=False):
                owner = first.setdefault(id(tensor), (module, name))
                if owner != (module, name):
                    shared.append((module, name, *owner))
        modules = list(self.model.modules())
        for module in modules:
            self._check_idle(module)
        try:
            for module in modules:
                self._restore(module)
            for module, name, holder, first_name in shared:
                if first_name in holder._parameters:
                    module._parameters[name] = holder._parameters[first_name]
            yield _describe_parked(self.model, self.names)
        finally:
            for module in modules:
                self._put_back(module)

    def open(self, layer: str, trace: LoaderTrace) -> None:
        """Put the load-time layout of `layer` in place, with bytes; elements that no tensor fills get a constant."""
        module = self._modules[layer]
        self._restore(module)
        self._open[layer] = module
        record = self.names.layer_record(module)
        self.names.materialize(module, record)
        parameters, buffers = self.names.params_and_buffers(module)
        # A buffer that no checkpoint holds keeps its values. 0.25 copies the load-time one back whatever it holds.
        for name, live in record.kernel_tensors[1].items():
            if name in self._unsaved[module] and name in buffers and Layout.of(buffers[name]) == Layout.of(live):
                buffers[name].copy_(live)
        self._pad(trace, (f"{layer}.{name}".lstrip(".") for name in (*parameters, *buffers)))

    def pad_in_place(self, layers: Collection[str], trace: LoaderTrace) -> None:
        """Give the elements that no tensor fills their constant in layers that are written in place.

        An engine that started with dummy weights, or threw its weights away in sleep, holds anything there. The other
        elements of such a parameter are lost too: a full refit has to follow.
        """
        named = dict(self.model.named_parameters())
        # A computed parameter may keep elements from before its loader ran; buffers are nobody's to blank.
        partial = trace.partial & named.keys() - trace.computed
        self._pad(trace, (storage for storage in partial if storage.rpartition(".")[0] in layers))

    def close(self, layer: str) -> None:
        """Run the post-load processing of an open layer; its result lands in the tensors the engine computes with."""
        module = self._open[layer]
        forget_kernel(module, self.names)
        with self.configured(), torch.no_grad():
            self.names.process_layer(module, self.names.layer_record(module))
        self._keep_unsaved(module)
        del self._open[layer]

    def process_again(self, layer: str) -> None:
        """Run the post-load processing of a layer on the tensors it holds now (its packed copy is of old ones)."""
        step = processing_of(self._modules[layer], self.names)
        if step is not None:
            with self.configured(), torch.no_grad():
                step(self._modules[layer])

    def undo(self) -> list[str]:
        """Give every open layer its old tensors back; what was written into the load-time layout is lost.

        Returns a sentence for each layer that could not be put back. Such a layer refuses every later refit.
        """
        faults = []
        for layer, module in self._open.items():
            try:
                self._put_back(module)
            except Exception as fault:  # whatever it is, the other layers can still be put back
                faults.append(f"layer {layer}: {type(fault).__name__}: {fault}")
        self._open.clear()
        return faults

    @contextmanager
    def scratch(self, layer: str) -> Iterator[nn.Module]:
        """`layer` with load-time tensors to experiment on; tensors and attributes come back as they were."""
        module = self._modules[layer]
        method = getattr(module, "quant_method", None)
        owners: list[dict[str, Any]] = [owner.__dict__ for owner in (module, method) if owner is not None]
        owners += [attributes["_modules"] for attributes in owners if "_modules" in attributes]
        before = [dict(attributes) for attributes in owners]
        self._restore(module)
        try:
            self.names.materialize(module, self.names.layer_record(module))
            yield module
        finally:
            self._put_back(module)
            for attributes, old in zip(owners, before, strict=True):
                attributes.clear()
                attributes.update(old)

    def _pad(self, trace: LoaderTrace, storages: Iterable[str]) -> None:
        for storage in storages:
            if storage not in trace.partial or storage.rpartition(".")[2] in self.names.never_parked:
                continue
            base = self.tensor(storage).detach()
            base.zero_()
            for view, value in trace.padding.get(storage, ()):
                base.as_strided(view.size, view.stride, base.storage_offset() + view.offset).fill_(value)

    def _check_idle(self, module: nn.Module) -> None:
        record = self.names.layer_record(module)
        if record.kernel_tensors is not None or record.can_load():
            raise TargetError(
                f"{type(module).__name__} is in the middle of another reload, or of a refit that could not be undone; "
                "finish that one first, or restart the engine"
            )

    def _restore(self, module: nn.Module) -> None:
        self._check_idle(module)
        record = self.names.layer_record(module)
        record.kernel_tensors = self.names.params_and_buffers(module)
        record.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        self.names.restore_on_meta(module, record)

    def _put_back(self, module: nn.Module) -> None:
        record = self.names.layer_record(module)
        if record.kernel_tensors is not None:
            self.names.place_kernel_tensors(module, record)
        record.reset()
        self._keep_unsaved(module)

    def _keep_unsaved(self, module: nn.Module) -> None:
        """0.25 registers every buffer that it puts back as one to be saved; undo that."""
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(self._unsaved[module])


def forget_kernel(module: nn.Module, names: VllmNames) -> None:
    """Make vLLM's MoE processing prepare the weights again, as it did at load.

    On CPU it packs w13 and w2 only while it builds the kernel object, so that object must be built anew. On a GPU
    the kernel must stay, since captured graphs point at it, and the weights are prepared either way.
    """
    method: Any = getattr(module, "quant_method", None)
    if names.on_cpu and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None


def processing_of(module: nn.Module, names: VllmNames) -> Callable[[nn.Module], None] | None:
    """The post-load processing step of a layer, or None when nothing processes it."""
    method: Any = getattr(module, "quant_method", None)
    is_processed = isinstance(method, names.quantize_method)
    step: Callable[[nn.Module], None] | None = method.process_weights_after_loading if is_processed else None
    return step


def _describe_parked(model: nn.Module, names: VllmNames) -> Parked:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    destinations: dict[str, torch.Tensor] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(tensor), name)
        if owner == name:
            destinations[name] = tensor
        else:
            aliases[name] = owner
    parameters = tuple(name for name, tensor in destinations.items() if tensor.numel())
    destinations.update(model.named_buffers())
    converted = {}
    for name, module in model.named_modules():
        # An AMX kernel on CPU turns a bfloat16 bias into float32.
        bias = module._parameters.get("bias")
        if bias is not None and isinstance(getattr(module, "quant_method", None), names.plain_linear):
            loaded = getattr(module, "params_dtype", bias.dtype)
            if bias.dtype != loaded:
                converted[f"{name}.bias"] = loaded
    return Parked(destinations, aliases, parameters, converted)
