"""The real megatron.core, where it can be imported: what it builds on each rank against the trainers on paper."""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec

import pytest
import torch
from equipment import virtual_models
from equipment.megatron_models import Held, Sizes, as_rank, held_by

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.virtual.megatron import megatron_source
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.places import Place
from nemo_rl_reshard.virtual.stages import trainer_stages

pytestmark = [
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="needs megatron.core on PYTHONPATH, as make test-megatron has it"
    ),
    pytest.mark.filterwarnings("ignore"),  # of its own imports
]

_KINDS = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "o_proj": "attention out",
    "gate": "router",
    "q_proj": "heads",
    "k_proj": "heads",
    "v_proj": "heads",
    "gate_proj": "up",
    "up_proj": "up",
    "down_proj": "down",
}
"""By the last name of a module in a checkpoint."""

DENSE = {"num_attention_heads": 6, "num_query_groups": 2, "ffn_hidden_size": 12}
WIDE = {"num_attention_heads": 8, "num_query_groups": 2, "ffn_hidden_size": 16}
EXPERTS = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 12,
    "num_moe_experts": 6,
    "moe_ffn_hidden_size": 4,
}
DENSE_SIZES = (
    Sizes(world=4, tp=2),
    Sizes(world=12, tp=2, cp=3, pp=2),
    Sizes(world=8, tp=2, pp=4),
    Sizes(world=6, tp=2, pp=3, first=3, last=3),
)
EXPERT_SIZES = (
    Sizes(world=4, tp=2, ep=2),
    Sizes(world=8, tp=2, ep=2, etp=2),
    Sizes(world=12, tp=2, pp=2, ep=3),
    Sizes(world=12, tp=1, cp=2, pp=2, ep=6),
    Sizes(world=8, tp=1, pp=1, ep=2, etp=4),
)


def row_in_whole(module: str, row: int, model: ModelShape, rows: int) -> int:
    """Where Megatron's whole weight has row `row` of the projection `module`, which has `rows`.

    A group of heads is its queries, its key and its value; up comes after all of gate.
    """
    if module == "up_proj":
        return rows + row
    if module not in {"q_proj", "k_proj", "v_proj"}:
        return row
    heads, groups = model.config["num_attention_heads"], model.config["num_key_value_heads"]
    per_group = heads // groups
    size = rows // (heads if module == "q_proj" else groups)
    head, inside = divmod(row, size)
    if module == "q_proj":
        group, slot = divmod(head, per_group)
    else:
        group, slot = head, per_group + (module == "v_proj")
    return (group * (per_group + 2) + slot) * size + inside


def on_paper(model: ModelShape, catalog: Catalog, rank: int) -> Held:
    """What `rank` holds of each kind but norms, as `held_by` tells it."""
    found: defaultdict[tuple[int | None, int | None, str], list[int]] = defaultdict(list)
    for name, layout in catalog.layouts.items():
        place = Place.of(name)
        module = place.part.removesuffix(".weight").rpartition(".")[2]
        if module not in _KINDS:
            continue
        rows, columns = layout.shape
        for region in layout.regions_of(rank):
            found[place.layer, place.expert, _KINDS[module]] += [
                row_in_whole(module, row, model, rows) * columns + column
                for row in range(region.offset[0], region.stop[0])
                for column in range(region.offset[1], region.stop[1])
            ]
    return {place: sorted(elements) for place, elements in found.items()}


def assert_equal_on_every_rank(model: ModelShape, sizes: Sizes, vocabulary: int, tied: bool, config, **paper) -> None:
    catalog = megatron_source(model, **sizes.as_arguments, **paper)
    for rank in range(sizes.world):
        real = held_by(rank, sizes, vocabulary, tied, {"hidden_size": 8, "kv_channels": 4, **config})
        assert real == on_paper(model, catalog, rank), f"rank {rank}"


@pytest.mark.parametrize("sizes", DENSE_SIZES, ids=str)
def test_dense_weights_layers_and_ends_are_where_megatron_has_them(sizes: Sizes) -> None:
    layers = 8
    stages = None if sizes.first is None else (3, 2, 3)
    model = virtual_models.dense(layers=layers)
    assert_equal_on_every_rank(model, sizes, 50, False, {"num_layers": layers, **DENSE}, stages=stages)


def test_a_tied_head_of_one_stage_is_no_weight_of_its_own() -> None:
    model = virtual_models.dense(layers=1, tied=True)
    assert_equal_on_every_rank(model, Sizes(world=2, tp=2), 50, True, {"num_layers": 1, **DENSE})


@pytest.mark.parametrize("sizes", DENSE_SIZES[:3], ids=str)
def test_a_tied_embedding_is_on_the_ranks_that_megatron_keeps_equal_b33(sizes: Sizes) -> None:
    """B33: it needs a GPU to build them, so only the group is compared."""
    layout = megatron_source(virtual_models.dense(layers=8, tied=True), **sizes.as_arguments).layouts[
        "model.embed_tokens.weight"
    ]
    for rank in range(sizes.world):
        with as_rank(rank, sizes) as state:
            assert state.is_rank_in_embedding_group() == (rank in layout.ranks), rank


@pytest.mark.parametrize("sizes", EXPERT_SIZES, ids=str)
def test_experts_are_where_megatron_has_them_b26(sizes: Sizes) -> None:
    layers = 4
    config = {"num_layers": layers, "moe_layer_freq": [0, 1, 1, 1], **EXPERTS}
    assert_equal_on_every_rank(virtual_models.experts(layers=layers), sizes, 64, False, config)


@pytest.mark.parametrize("tp", [4, 8])
def test_fused_heads_are_cut_inside_a_group_b30(tp: int) -> None:
    """B30: two key/value heads; eight ranks cut through the key as well."""
    shapes = {"model.embed_tokens.weight": (64, 8)} | virtual_models.attention(0, 8, 2, 4, 8)
    shapes |= virtual_models.feed_forward("model.layers.0.mlp", 16, 8)
    shapes |= {"model.norm.weight": (8,), "lm_head.weight": (64, 8)}
    model = virtual_models.model(shapes, num_attention_heads=8, num_key_value_heads=2)
    assert_equal_on_every_rank(model, Sizes(world=tp, tp=tp), 64, False, {"num_layers": 1, **WIDE})


@pytest.mark.parametrize(("layers", "pp"), [(8, 4), (61, 16), (94, 8), (60, 8), (27, 4), (27, 2), (7, 6)])
def test_stages_are_those_that_megatron_builds_of_two_numbers_b29(layers: int, pp: int) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    expected = trainer_stages(layers, pp)
    ends = {}
    if layers % pp:
        ends = {"num_layers_in_first_pipeline_stage": expected[0], "num_layers_in_last_pipeline_stage": expected[-1]}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.bfloat16,
        **ends,
    )
    assert tuple(get_num_layers_to_build(config, pp_rank=stage) for stage in range(pp)) == expected
    offsets = [get_transformer_layer_offset(config, pp_rank=stage) for stage in range(pp)]
    assert offsets == [sum(expected[:stage]) for stage in range(pp)]


@pytest.mark.parametrize("sizes", [*DENSE_SIZES[:3], *EXPERT_SIZES], ids=str)
def test_ranks_count_tp_then_cp_then_dp_then_pp_and_etp_then_ep_for_experts(sizes: Sizes) -> None:
    per_stage = sizes.world // sizes.pp
    for rank in range(sizes.world):
        with as_rank(rank, sizes) as state:
            inside = rank % per_stage
            assert state.get_pipeline_model_parallel_rank() == rank // per_stage
            assert state.get_tensor_model_parallel_rank() == inside % sizes.tp
            assert state.get_context_parallel_rank() == inside // sizes.tp % sizes.cp
            assert state.get_expert_tensor_parallel_rank() == inside % sizes.etp
            assert state.get_expert_model_parallel_rank() == inside // sizes.etp % sizes.ep
