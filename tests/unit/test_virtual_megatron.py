"""Megatron on paper: two unrelated grids over the ranks of a stage, uneven stages, fused heads."""

from __future__ import annotations

import pytest
from equipment import virtual_models

from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.virtual.megatron import megatron_source

LAYER = "model.layers.1"


def held(catalog, name):
    """rank -> [(offset, extent), ...] of one tensor."""
    return {rank: [(r.offset, r.extent) for r in regions] for rank, regions in catalog.layouts[name].held}


def test_dense_weights_are_cut_over_tp_and_copied_over_cp_and_dp():
    catalog = megatron_source(virtual_models.dense(), world=12, tp=2, cp=3, first_rank=100)
    name = f"{LAYER}.mlp.gate_proj.weight"
    assert held(catalog, name) == {100 + rank: [((rank % 2 * 6, 0), (6, 8))] for rank in range(12)}
    assert catalog.ranks == tuple(range(100, 112))


def test_experts_ignore_the_dense_grid_b26():
    """B26: tp 2, dp 4 for what is dense; etp 2, ep 2 and two copies for experts, on the same eight ranks."""
    catalog = megatron_source(virtual_models.experts(), world=8, tp=2, ep=2, etp=2)
    first, last = (f"{LAYER}.mlp.experts.{expert}.up_proj.weight" for expert in (0, 5))
    low, high = [((0, 0), (2, 8))], [((2, 0), (2, 8))]
    assert held(catalog, first) == {0: low, 1: high, 4: low, 5: high}
    assert held(catalog, last) == {2: low, 3: high, 6: low, 7: high}
    assert list(held(catalog, f"{LAYER}.mlp.gate.weight")) == list(range(8))


def test_ep_runs_across_tp_ranks_b26():
    """B26: with etp 1, each of the two tp ranks is another expert rank."""
    catalog = megatron_source(virtual_models.experts(), world=4, tp=2, ep=2)
    assert list(held(catalog, f"{LAYER}.mlp.experts.0.down_proj.weight")) == [0, 2]
    assert list(held(catalog, f"{LAYER}.mlp.experts.3.down_proj.weight")) == [1, 3]


def test_stages_may_be_uneven_b29():
    catalog = megatron_source(virtual_models.dense(layers=4), world=4, tp=2, pp=2, stages=(1, 3))
    ranks = [list(held(catalog, f"model.layers.{layer}.input_layernorm.weight")) for layer in range(4)]
    assert ranks == [[0, 1], [2, 3], [2, 3], [2, 3]]
    assert list(held(catalog, "model.embed_tokens.weight")) == [0, 1]
    assert list(held(catalog, "lm_head.weight")) == [2, 3]
    assert list(held(catalog, "model.norm.weight")) == [2, 3]


def test_a_tied_embedding_is_on_both_ends_b33():
    catalog = megatron_source(virtual_models.dense(layers=3, tied=True), world=3, pp=3)
    assert list(held(catalog, "model.embed_tokens.weight")) == [0, 2]


def test_more_ranks_than_key_value_heads_cut_inside_a_group_b30():
    """B30: two groups of 4 queries, a key and a value of 4 rows, 48 fused rows; four ranks hold 12 each."""
    model = virtual_models.model(virtual_models.attention(0, 8, 2, 4, 8), num_attention_heads=8, num_key_value_heads=2)
    catalog = megatron_source(model, world=4, tp=4)
    path = "model.layers.0.self_attn"
    assert held(catalog, f"{path}.q_proj.weight") == {
        0: [((0, 0), (12, 8))],
        1: [((12, 0), (4, 8))],
        2: [((16, 0), (12, 8))],
        3: [((28, 0), (4, 8))],
    }
    assert held(catalog, f"{path}.k_proj.weight") == {1: [((0, 0), (4, 8))], 3: [((4, 0), (4, 8))]}


def test_gates_lie_behind_the_queries_of_their_group():
    """Four gated heads of 4 rows in two groups of 24 fused rows: half a group is two queries and the first's gate."""
    gated = virtual_models.attention(0, 4, 2, 4, 8, gated=True)
    model = virtual_models.model(gated, num_attention_heads=4, num_key_value_heads=2)
    found = held(megatron_source(model, world=4, tp=4), "model.layers.0.self_attn.q_proj.weight")
    # A checkpoint has query, gate, query, gate.
    assert found == {0: [((0, 0), (12, 8))], 1: [((12, 0), (4, 8))], 2: [((16, 0), (12, 8))], 3: [((28, 0), (4, 8))]}


@pytest.mark.parametrize(("multiple", "first"), [(1, 26), (16, 32), (64, 51)])
def test_a_padded_vocabulary_ends_early_b35(multiple, first):
    """B35: 51 tokens are padded to 52, 64 or 128, of which the first of two ranks has half."""
    catalog = megatron_source(virtual_models.dense(vocabulary=51), world=2, tp=2, vocab_multiple=multiple)
    expected = {0: [((0, 0), (first, 8))], 1: [((first, 0), (51 - first, 8))] if first < 51 else []}
    assert {rank: held(catalog, "lm_head.weight").get(rank, []) for rank in (0, 1)} == expected


def test_without_padding_tp_divides_the_vocabulary():
    with pytest.raises(ConfigError, match=r"tp 2: lm_head.weight and its like .*51 cannot be divided over 2 ranks"):
        megatron_source(virtual_models.dense(vocabulary=51), world=2, tp=2)


def test_heads_and_groups_are_not_cut_through():
    """megatron.core refuses each of these before it builds a weight."""
    with pytest.raises(ConfigError, match="tp 4: does not divide the query heads, 6"):
        megatron_source(virtual_models.dense(), world=4, tp=4)
    heads = virtual_models.attention(0, 12, 3, 4, 8)
    model = virtual_models.model(heads, num_attention_heads=12, num_key_value_heads=3)
    with pytest.raises(ConfigError, match="tp 2: is neither a divisor nor a multiple of the key/value heads, 3"):
        megatron_source(model, world=2, tp=2)
    assert megatron_source(model, world=6, tp=6).ranks == tuple(range(6))
    with pytest.raises(ConfigError, match="tp 4: does not divide the groups of the state-space mixer, 2"):
        megatron_source(virtual_models.state_space(), world=4, tp=4)
    with pytest.raises(ConfigError, match=r"tp \* cp = 4: does not divide the key heads of linear attention, 2"):
        megatron_source(virtual_models.delta(), world=4, tp=2, cp=2)


def test_every_size_that_does_not_fit_is_named():
    with pytest.raises(ConfigError) as caught:
        megatron_source(virtual_models.experts(), world=10, tp=4, ep=4, stages=(1, 2))
    text = str(caught.value)
    for part in (
        "tp * cp * pp = 4: does not divide world 10",
        "ep * etp = 4: does not divide the ranks of a stage, world / pp = 10",
        "ep 4: does not divide the experts of a layer, 6",
        "stages [1, 2]: must be 1 counts of layers that add up to 2",
    ):
        assert part in text
    with pytest.raises(ConfigError, match="pp 3: the model has 2 layers"):
        megatron_source(virtual_models.experts(), world=3, pp=3)
    with pytest.raises(ConfigError, match=r"etp 8: model.layers.1.mlp.experts.0.gate_proj.weight and its like"):
        megatron_source(virtual_models.experts(), world=8, etp=8)
