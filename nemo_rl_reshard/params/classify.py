"""Feed-forward or leftover: what a tensor is, told from its checkpoint name and the model's architecture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ClassKind(StrEnum):
    """What kind of tensor a name stands for."""

    FEED_FORWARD = "feed_forward"
    LEFTOVER = "leftover"
    ADAPTER = "adapter"
    WRAPPED = "wrapped"


@dataclass(frozen=True, slots=True)
class Class:
    """`kind`, and in `reason` why. ADAPTER: a LoRA tensor, never sent. WRAPPED: a name of an unmerged LoRA wrapper."""

    kind: ClassKind
    reason: str


INTERLEAVED_EXPERTS = frozenset({"GptOssForCausalLM"})
"""Architectures whose stacked gate and up rows alternate, so that halves are not gate and up."""

_DENSE = Class(ClassKind.FEED_FORWARD, "dense feed-forward projection")
_EXPERT = Class(ClassKind.FEED_FORWARD, "routed expert projection")
_STACKED = Class(ClassKind.FEED_FORWARD, "stacked routed expert projections")

_ADAPTER = Class(ClassKind.ADAPTER, "LoRA adapter: only merged base weights are sent")
_WRAPPED = Class(ClassKind.WRAPPED, "name of a LoRA wrapper: merge the adapter and use the plain name")
_DRAFT = Class(ClassKind.LEFTOVER, "draft (MTP) layer: the engine keeps it in a separate drafter")
_TOWER = Class(ClassKind.LEFTOVER, "vision or audio tower: its feed-forward is not the language model's")
_SHARED = Class(ClassKind.LEFTOVER, "shared expert: engines fuse it differently from routed experts")
_SHARED_GATE = Class(ClassKind.LEFTOVER, "gate of the shared expert")
_ROUTER = Class(ClassKind.LEFTOVER, "router of the experts")
_SCORE_BIAS = Class(ClassKind.LEFTOVER, "router score correction: keeps its own dtype")
_EXPERT_BIAS = Class(ClassKind.LEFTOVER, "expert bias: loaded together with its experts")
_BIAS = Class(ClassKind.LEFTOVER, "feed-forward bias")
_INTERLEAVED = Class(ClassKind.LEFTOVER, "expert gate and up rows alternate in this architecture")
_SCALE = Class(ClassKind.LEFTOVER, "quantisation scale or packed weight")
_LINEAR_ATTENTION = Class(ClassKind.LEFTOVER, "linear attention: merged projections are interleaved by group")
_ATTENTION = Class(ClassKind.LEFTOVER, "attention")
_NORM = Class(ClassKind.LEFTOVER, "norm")
_OUTSIDE = Class(ClassKind.LEFTOVER, "not in a decoder layer")
_OTHER = Class(ClassKind.LEFTOVER, "not a feed-forward projection")

_PROJECTIONS = frozenset(
    {"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2", "c_fc", "dense_h_to_4h"}
    | {"dense_4h_to_h", "w13", "gate_and_up_proj"}
)
_PARENTS = frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe", "mixer", "moe"})
_LAYERS = frozenset({"layers", "h", "blocks"})
_DRAFT_PARTS = frozenset(
    {"mtp", "mtp_layers", "mtp_block", "draft", "draft_model", "drafter", "eagle", "medusa", "nextn"}
)
_TOWER_PARTS = frozenset(
    {"visual", "vision", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "audio", "vit"}
    | {"audio_tower", "audio_model", "audio_encoder", "multi_modal_projector", "mm_projector", "embed_vision"}
    | {"embed_audio", "thinker_audio", "patch_embed", "image_encoder", "speech_encoder"}
)
_SHARED_PARTS = frozenset({"shared_expert", "shared_experts", "shared_mlp"})
_ATTENTION_PARTS = frozenset({"self_attn", "attn", "attention", "self_attention", "cross_attn"})
_LEAVES = frozenset({"weight", "bias"})
_DRAFT_MARKS = (".eh_proj.weight", ".enorm.weight", ".hnorm.weight")


def classify(name: str, architecture: str | None = None, draft_layers: frozenset[str] = frozenset()) -> Class:
    """Classify one canonical checkpoint name. `draft_layers` are layer prefixes known to be draft layers.

    FEED_FORWARD is given only to what is known to be one; every other name is a LEFTOVER, which is always right.
    """
    parts = name.split(".")
    found = set(parts)
    if any(part.startswith("lora_") for part in parts):
        return _ADAPTER
    if "base_layer" in found or name.startswith("base_model.model."):
        return _WRAPPED
    if found & _DRAFT_PARTS or (draft_layers and _layer_prefix(parts) in draft_layers):
        return _DRAFT
    if found & _TOWER_PARTS:
        return _TOWER
    if _layer_prefix(parts) is None:
        return _OUTSIDE
    if "shared_expert_gate" in found:
        return _SHARED_GATE
    if found & _SHARED_PARTS:
        return _SHARED
    leaf = parts[-1] if parts[-1] in _LEAVES else ""
    body = parts[:-1] if leaf else parts
    if "experts" in found:
        return _expert(body, leaf, architecture)
    return _dense(body, leaf, found)


def draft_layers(names: Iterable[str]) -> frozenset[str]:
    """Prefixes of numbered layers that carry a draft layer's marks (DeepSeek keeps its MTP layer beside the others)."""
    marked = (name for name in names if name.endswith(_DRAFT_MARKS))
    return frozenset(prefix for name in marked if (prefix := _layer_prefix(name.split("."))) is not None)


def expert_group(name: str) -> str | None:
    """The group of routed experts a tensor belongs to, as the name prefix they share; None outside experts.

    Engines may load a group as one: its members must take the same route and come in the same `load` call.
    """
    head, found, _ = name.partition(".experts.")
    return f"{head}.experts" if found else None


def _layer_prefix(parts: list[str]) -> str | None:
    """`model.layers.3` of the parts of a name inside that layer; None outside layers."""
    for position, part in enumerate(parts[:-1]):
        if part in _LAYERS and parts[position + 1].isdigit():
            return ".".join(parts[: position + 2])
    return None


def _expert(body: list[str], leaf: str, architecture: str | None) -> Class:
    """Classify a tensor under `experts`."""
    if architecture in INTERLEAVED_EXPERTS:
        return _INTERLEAVED
    below = body[body.index("experts") + 1 :]
    last = below[-1] if below else ""
    if leaf == "bias" or last.endswith("_bias"):
        return _EXPERT_BIAS
    if _is_scale(last):
        return _SCALE
    if len(below) == 2 and below[0].isdigit() and below[1] in _PROJECTIONS:
        return _EXPERT
    if len(below) == 1 and last in _PROJECTIONS:
        return _STACKED
    return _OTHER


def _dense(body: list[str], leaf: str, found: set[str]) -> Class:
    """Classify a tensor of a layer that is no routed or shared expert."""
    last = body[-1]
    if last in {"e_score_correction_bias", "expert_bias"}:
        return _SCORE_BIAS
    if _is_scale(last):
        return _SCALE
    parent = body[-2] if len(body) > 1 else ""
    if "router" in found or (last in {"gate", "wg"} and parent in _PARENTS):
        return _ROUTER
    if last in _PROJECTIONS and (parent in _PARENTS or parent.isdigit()):
        return _BIAS if leaf == "bias" else _DENSE
    if "linear_attn" in found:
        return _LINEAR_ATTENTION
    if found & _ATTENTION_PARTS:
        return _ATTENTION
    return _NORM if "norm" in last else _OTHER


def _is_scale(last: str) -> bool:
    """True for what quantised checkpoints keep beside or instead of a weight."""
    return "scale" in last or last in {"qweight", "qzeros", "g_idx", "weight_packed", "weight_shape", "zero_point"}
