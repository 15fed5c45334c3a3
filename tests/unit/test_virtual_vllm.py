"""vLLM on paper: the rules that real traces confirm (engine/test_virtual_traces.py), and sizes that do not fit."""

from __future__ import annotations

import pytest
from equipment import virtual_models

from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.virtual.vllm import vllm_target

LAYER = "model.layers.1"


def held(catalog, name):
    """rank -> [(offset, extent), ...] of one tensor."""
    return {rank: [(r.offset, r.extent) for r in regions] for rank, regions in catalog.layouts[name].held}


def test_key_value_heads_are_copied_and_the_rest_is_cut_b30():
    catalog = vllm_target(virtual_models.experts(), world=4, tp=4, first_rank=0)
    assert held(catalog, f"{LAYER}.self_attn.q_proj.weight") == {r: [((4 * r, 0), (4, 8))] for r in range(4)}
    assert held(catalog, f"{LAYER}.self_attn.k_proj.weight") == {r: [((r // 2 * 4, 0), (4, 8))] for r in range(4)}
    assert held(catalog, f"{LAYER}.self_attn.o_proj.weight") == {r: [((0, 4 * r), (8, 4))] for r in range(4)}
    assert held(catalog, f"{LAYER}.self_attn.q_norm.weight") == {r: [((0,), (4,))] for r in range(4)}


def test_experts_are_cut_or_dealt_whole_b25():
    name = f"{LAYER}.mlp.experts.4.down_proj.weight"
    cut = vllm_target(virtual_models.experts(), world=4, tp=2, dp=2, first_rank=10)
    assert held(cut, name) == {10: [((0, 0), (8, 2))], 11: [((0, 2), (8, 2))], 12: [((0, 0), (8, 2))]} | {
        13: [((0, 2), (8, 2))]
    }
    dealt = vllm_target(virtual_models.experts(), world=4, tp=2, dp=2, ep=2, first_rank=10)
    assert held(dealt, name) == {11: [((0, 0), (8, 4))], 13: [((0, 0), (8, 4))]}


def test_uneven_experts_go_to_the_first_ranks_b25():
    """B25: six experts over four ranks of two engines that work as one: 2, 2, 1, 1."""
    catalog = vllm_target(virtual_models.experts(), world=4, tp=2, dp=2, ep=4, first_rank=0)
    owners = [list(held(catalog, f"{LAYER}.mlp.experts.{e}.up_proj.weight")) for e in range(6)]
    assert owners == [[0], [0], [1], [1], [2], [3]]
    assert list(held(catalog, f"{LAYER}.self_attn.q_proj.weight")) == [0, 1, 2, 3]


def test_latent_projections_are_whole_and_what_leaves_them_has_heads_b32():
    catalog = vllm_target(virtual_models.latent(), world=2, tp=2, first_rank=0)
    path = f"{LAYER}.self_attn"
    whole = Region.whole((5, 16))
    assert catalog.layouts[f"{path}.kv_a_proj_with_mqa.weight"].held == ((0, (whole,)), (1, (whole,)))
    assert held(catalog, f"{path}.kv_b_proj.weight") == {0: [((0, 0), (16, 3))], 1: [((16, 0), (16, 3))]}
    assert catalog.specs[f"{LAYER}.mlp.gate.e_score_correction_bias"].dtype == "float32"


def test_shared_experts_are_cut_unless_engines_divide_the_tokens():
    name = f"{LAYER}.mlp.shared_experts.gate_proj.weight"
    apart = vllm_target(virtual_models.latent(), world=4, tp=2, dp=2, ep=2, first_rank=0)
    assert held(apart, name)[1] == [((4, 0), (4, 16))]
    together = vllm_target(virtual_models.latent(), world=4, tp=2, dp=2, ep=4, first_rank=0)
    assert held(together, name) == {rank: [((0, 0), (8, 16))] for rank in range(4)}


def test_a_delta_net_is_cut_section_by_section():
    catalog = vllm_target(virtual_models.delta(), world=2, tp=2, first_rank=0)
    path = "model.layers.0.linear_attn"
    keys, values = 3, 10  # rows of a rank's key heads and value heads; queries and keys have equally many
    expected = [((0, 0), (keys, 8)), ((6, 0), (keys, 8)), ((12, 0), (values, 8))]
    assert held(catalog, f"{path}.in_proj_qkv.weight")[0] == expected
    assert held(catalog, f"{path}.conv1d.weight")[1][2] == ((22, 0, 0), (10, 1, 4))
    assert held(catalog, f"{path}.A_log") == {0: [((0,), (2,))], 1: [((2,), (2,))]}
    assert catalog.specs[f"{path}.A_log"].dtype == "float32"


def test_a_state_space_mixer_is_cut_section_by_section_and_its_rates_are_computed():
    catalog = vllm_target(virtual_models.state_space(), world=2, tp=2, first_rank=0)
    path = "backbone.layers.0.mixer"
    sections = [(0, 6), (12, 6), (24, 5), (34, 5), (44, 2)]
    assert held(catalog, f"{path}.in_proj.weight")[0] == [((start, 0), (size, 8)) for start, size in sections]
    assert catalog.indirect == {f"{path}.A_log": "the engine keeps the negative exponential of it"}
    assert held(catalog, f"{path}.A_log") == {}


def test_stages_hold_their_layers_and_the_ends_what_is_outside():
    catalog = vllm_target(virtual_models.dense(layers=3), world=4, tp=2, pp=2, first_rank=0)
    ranks = {name: list(held(catalog, name)) for name in catalog.specs}
    assert [ranks[f"model.layers.{layer}.input_layernorm.weight"] for layer in range(3)] == [[0, 1], [0, 1], [2, 3]]
    assert ranks["model.embed_tokens.weight"] == [0, 1]
    assert ranks["model.norm.weight"] == [2, 3]
    assert ranks["lm_head.weight"] == [2, 3]
    assert held(catalog, "lm_head.weight")[3] == [((32, 0), (18, 8))]


def test_which_stages_have_the_embedding_depends_on_the_family_b33():
    """B33: tied, the last stage has it as well; some of vLLM's models keep it everywhere."""
    tokens = "model.embed_tokens.weight"
    tied = vllm_target(virtual_models.dense(layers=3, tied=True), world=3, tp=1, pp=3, first_rank=0)
    assert list(held(tied, tokens)) == [0, 2]
    everywhere = vllm_target(virtual_models.experts(layers=3), world=3, tp=1, pp=3, first_rank=0)
    assert list(held(everywhere, tokens)) == list(held(everywhere, "lm_head.weight")) == [0, 1, 2]
    delta = vllm_target(virtual_models.delta(), world=2, tp=1, pp=2, first_rank=0)
    assert list(held(delta, tokens)) == [0, 1]
    assert list(held(delta, "lm_head.weight")) == [1]


def test_every_size_that_does_not_fit_is_named():
    with pytest.raises(ConfigError) as caught:
        vllm_target(virtual_models.experts(), world=7, tp=3, dp=2, ep=4, pp=9, first_rank=0)
    for part in ("world 7: is not tp 3 * dp 2 * pp 9 = 54", "ep 4: must be 1, or tp 3", "pp 9: the model has 2 layers"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"tp 0: must be at least 1"):
        vllm_target(virtual_models.experts(), world=1, tp=0, first_rank=0)
    with pytest.raises(ConfigError, match=r"ep 8: the model has 6 experts"):
        vllm_target(virtual_models.experts(), world=8, tp=8, ep=8, first_rank=0)


def test_every_weight_that_cannot_be_cut_is_named_once_per_kind():
    with pytest.raises(ConfigError) as caught:
        vllm_target(virtual_models.dense(), world=4, tp=4, first_rank=0)
    text = str(caught.value)
    assert "tp 4: model.layers.0.self_attn.q_proj.weight and its like (query heads): 6 cannot be divided" in text
    assert "layers.1" not in text


def test_a_tensor_of_an_unknown_kind_is_refused_by_name():
    odd = virtual_models.model({"model.layers.0.mlp.tensor_train.weight": (4, 4), "model.novel.weight": (2, 2)})
    with pytest.raises(ConfigError) as caught:
        vllm_target(odd, world=1, tp=1, first_rank=0)
    assert "model.layers.0.mlp.tensor_train.weight [4, 4]: no rule says" in str(caught.value)
    assert "model.novel.weight [2, 2]" in str(caught.value)


def test_mixtral_keeps_what_is_outside_layers_on_every_stage():
    shapes = {"model.embed_tokens.weight": (64, 4), "model.norm.weight": (4,), "lm_head.weight": (64, 4)}
    for layer in range(2):
        shapes[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = (2, 4)
        shapes[f"model.layers.{layer}.block_sparse_moe.experts.1.w1.weight"] = (6, 4)
        shapes[f"model.layers.{layer}.block_sparse_moe.experts.1.w2.weight"] = (4, 6)
    catalog = vllm_target(virtual_models.model(shapes, "MixtralForCausalLM"), world=4, tp=2, pp=2, first_rank=0)
    assert all(list(held(catalog, name)) == [0, 1, 2, 3] for name in list(shapes)[:3])
    path = f"{LAYER}.block_sparse_moe.experts.1"
    assert held(catalog, f"{path}.w1.weight") == {2: [((0, 0), (3, 4))], 3: [((3, 0), (3, 4))]}
    assert held(catalog, f"{path}.w2.weight") == {2: [((0, 0), (4, 3))], 3: [((0, 3), (4, 3))]}
