"""Trace a live vLLM model: put its load-time layout back for a moment, watch its loader, restore every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard.params.classify import classify, draft_layers
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.targets.loader_trace import LoaderTrace, trace_loader
from nemo_rl_reshard.targets.vllm_layers import Layout, VllmLayers


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """`loader`: where each checkpoint tensor lands. `layouts`: load-time layout of each parameter and buffer that a
    tensor lands in, by full name. `aliases`: further names of tied parameters -> their first."""

    loader: LoaderTrace
    layouts: Mapping[str, Layout]
    aliases: Mapping[str, str]


def trace_model(layers: VllmLayers, specs: Sequence[TensorSpec]) -> ModelTrace:
    """Trace the model's `load_weights` against the trainer's tensors. Call it between requests, not during one.

    Raises TargetError as `trace_loader` does. The live tensors keep their addresses and bits either way.
    """
    drafts = draft_layers(spec.name for spec in specs)
    with layers.parked() as parked, layers.configured():
        model: Any = layers.model
        loader = trace_loader(
            model.load_weights,
            specs,
            parked.destinations,
            parked.aliases,
            parked.parameters,
            optional=lambda name: classify(name, None, drafts).reason.startswith("draft"),
            converted=parked.converted,
        )
        used = {storage for storages in loader.feeds.values() for storage in storages}
        layouts = {name: Layout.of(tensor) for name, tensor in parked.destinations.items() if name in used}
        return ModelTrace(loader, layouts, parked.aliases)
