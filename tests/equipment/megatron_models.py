"""What the real megatron.core builds on each rank of a world that this process only pretends to be part of.

Nothing here is imported unless megatron.core is there; see tests/contract/test_contract_megatron.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

Held = dict[tuple[int | None, int | None, str], list[int]]
"""(layer, expert, kind of weight) -> which elements of the whole weight one rank holds, ascending."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_KINDS = {
    "embedding.word_embeddings.weight": "embedding",
    "output_layer.weight": "head",
    "decoder.final_layernorm.weight": "final norm",
    "self_attention.linear_qkv.weight": "heads",
    "self_attention.linear_proj.weight": "attention out",
    "mlp.router.weight": "router",
    "mlp.linear_fc1.weight": "up",
    "mlp.linear_fc2.weight": "down",
    "linear_fc1.weight": "up",
    "linear_fc2.weight": "down",
}
"""By what a parameter is called in megatron.core; those of experts without their path, those of norms left out."""
NORMS = ("norm", "final norm")
"""Whole, and filled by nobody."""


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes of a world, and how many layers its first and last stage have where that is not even."""

    world: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    first: int | None = None
    last: int | None = None

    @property
    def as_arguments(self) -> dict[str, int]:
        """What `megatron_source` takes."""
        return {name: getattr(self, name) for name in ("world", "tp", "pp", "ep", "etp", "cp")}


@contextmanager
def as_rank(rank: int, sizes: Sizes) -> Iterator[Any]:
    """megatron.core's parallel state as it is on `rank`; nothing is ever sent."""
    from megatron.core import parallel_state

    dist.init_process_group("fake", rank=rank, world_size=sizes.world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.etp,
            create_gloo_process_groups=False,
        )
        yield parallel_state
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def held_by(rank: int, sizes: Sizes, vocabulary: int, tied: bool, config: Mapping[str, Any]) -> Held:
    """What megatron.core builds on `rank`. `config` are fields of its TransformerConfig.

    Weights are filled with the places of their elements in the whole weight before it cuts them: heads as groups of
    queries, key and value; the gate projection above the up projection. The model is not told of context parallelism,
    for which its attention would need a GPU.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    with as_rank(rank, sizes) as state:
        filled = TransformerConfig(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.etp,
            num_layers_in_first_pipeline_stage=sizes.first,
            num_layers_in_last_pipeline_stage=sizes.last,
            use_cpu_initialization=True,
            add_bias_linear=False,
            gated_linear_unit=True,
            normalization="RMSNorm",
            pipeline_dtype=torch.float32,
            init_method=_fill_with_places,
            output_layer_init_method=_fill_with_places,
            **config,
        )
        model = GPTModel(
            config=filled,
            transformer_layer_spec=get_gpt_decoder_block_spec(filled, use_transformer_engine=False),
            vocab_size=vocabulary,
            max_sequence_length=4,
            pre_process=state.is_pipeline_first_stage(),
            post_process=state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
        )
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        first_expert = state.get_expert_model_parallel_rank() * (config.get("num_moe_experts") or 0) // sizes.ep
        return {
            place: sorted(parameter.detach().flatten().int().tolist())
            for name, parameter in model.named_parameters()
            if (place := _place(name, numbers, first_expert))[2] not in NORMS
        }


def _fill_with_places(whole: torch.Tensor) -> None:
    with torch.no_grad():
        whole.copy_(torch.arange(whole.numel()).view(whole.shape))


def _place(name: str, layers: list[int], first_expert: int) -> tuple[int | None, int | None, str]:
    inside = _LAYER.fullmatch(name)
    if inside is None:
        return None, None, _KINDS[name]
    layer, rest = layers[int(inside[1])], inside[2]
    routed = _EXPERT.fullmatch(rest)
    if routed is not None:
        return layer, first_expert + int(routed[1]), _KINDS[routed[2]]
    return layer, None, _KINDS.get(rest, "norm")
