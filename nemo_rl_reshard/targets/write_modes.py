"""How each layer of one model takes new weights: in place, or by restore, write, process; decided once, at set-up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_reshard.errors import FaultList, TargetError
from nemo_rl_reshard.targets.vllm_layers import Layout, VllmLayers, processing_of
from nemo_rl_reshard.targets.vllm_probe import why_not_live
from nemo_rl_reshard.targets.vllm_trace import ModelTrace


class WriteMode(StrEnum):
    """What a caller asks for. AUTO takes LIVE wherever it is proven."""

    AUTO = "auto"
    LIVE = "live"
    PACKED = "packed"


@dataclass(frozen=True, slots=True)
class LayerMode:
    """How one layer is written, and why it is not written in place (empty when it is).

    `followers` are further layers that share its parameters and must be processed again after it (tied heads).
    """

    mode: WriteMode
    reason: str = ""
    followers: tuple[str, ...] = ()


def decide_modes(layers: VllmLayers, trace: ModelTrace, wanted: WriteMode) -> dict[str, LayerMode]:
    """The mode of every layer that a checkpoint tensor lands in.

    Raises TargetError listing every layer for which LIVE was asked and could not be proven.
    """
    faults = FaultList("writing in place", TargetError)
    per_layer: dict[str, dict[str, Layout]] = defaultdict(dict)
    for storage, layout in trace.layouts.items():
        layer, _, name = storage.rpartition(".")
        per_layer[layer][name] = layout
    followers: dict[str, list[str]] = defaultdict(list)
    for alias, storage in trace.aliases.items():
        follower, layer = alias.rpartition(".")[0], storage.rpartition(".")[0]
        if processing_of(layers.module(follower), layers.names) is not None:
            followers[layer].append(follower)
    modes = {}
    for layer, load_time in per_layer.items():
        behind = tuple(dict.fromkeys(followers[layer]))
        reason = _why_packed(layers, layer, load_time, behind, wanted)
        if reason is None:
            modes[layer] = LayerMode(WriteMode.LIVE)
            continue
        if wanted is WriteMode.LIVE:
            faults.add(f"layer {layer}: {reason}; use mode auto or packed")
        modes[layer] = LayerMode(WriteMode.PACKED, reason, behind)
    faults.raise_if_any()
    return modes


def _why_packed(
    layers: VllmLayers, layer: str, load_time: Mapping[str, Layout], followers: tuple[str, ...], wanted: WriteMode
) -> str | None:
    if wanted is WriteMode.PACKED:
        step = processing_of(layers.module(layer), layers.names)
        return "packed mode was asked for" if step is not None or followers else None
    reason = why_not_live(layers, layer, load_time)
    for follower in followers:
        reason = reason or why_not_live(layers, follower, load_time)
    return reason
