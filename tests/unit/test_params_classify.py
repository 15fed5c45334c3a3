"""Canonical names to classes: what is feed-forward, and why the rest is not."""

import time

import pytest

from nemo_rl_reshard.params.classify import ClassKind, classify, draft_layers, expert_group

FEED_FORWARD = [
    ("model.layers.0.mlp.gate_proj.weight", "dense"),
    ("model.layers.11.mlp.up_proj.weight", "dense"),
    ("model.layers.0.mlp.down_proj.weight", "dense"),
    ("model.layers.0.mlp.gate_up_proj.weight", "dense"),
    ("language_model.model.layers.0.mlp.gate_proj.weight", "dense"),
    ("model.language_model.layers.0.mlp.down_proj.weight", "dense"),
    ("transformer.h.3.mlp.c_fc.weight", "dense"),
    ("model.decoder.layers.0.fc1.weight", "dense"),
    ("model.layers.0.feed_forward.w1.weight", "dense"),
    ("backbone.layers.4.mixer.up_proj.weight", "dense"),
    ("model.layers.0.mlp.experts.0.gate_proj.weight", "routed"),
    ("model.layers.0.mlp.experts.127.down_proj.weight", "routed"),
    ("model.layers.0.block_sparse_moe.experts.3.w2.weight", "routed"),
    ("backbone.layers.1.mixer.experts.7.up_proj.weight", "routed"),  # ungated experts
    ("backbone.layers.1.mixer.experts.7.down_proj.weight", "routed"),
    ("model.layers.0.mlp.experts.gate_up_proj", "stacked"),  # B19: with and without .weight
    ("model.layers.0.mlp.experts.gate_up_proj.weight", "stacked"),
    ("model.layers.0.mlp.experts.down_proj", "stacked"),
]

LEFTOVER = [
    ("model.embed_tokens.weight", "not in a decoder layer"),
    ("lm_head.weight", "not in a decoder layer"),
    ("model.norm.weight", "not in a decoder layer"),
    ("model.layers.0.input_layernorm.weight", "norm"),
    ("model.layers.0.self_attn.q_proj.weight", "attention"),
    ("model.layers.0.self_attn.q_norm.weight", "attention"),
    ("model.layers.0.mlp.down_proj.bias", "feed-forward bias"),
    ("mtp.layers.0.mlp.experts.0.gate_proj.weight", "draft"),  # B17
    ("mtp.layers.0.mlp.down_proj.weight", "draft"),
    ("model.mtp.layers.0.mlp.up_proj.weight", "draft"),
    ("model.layers.0.mlp.shared_expert.gate_proj.weight", "shared expert"),  # B18
    ("model.layers.0.mlp.shared_experts.up_proj.weight", "shared expert"),
    ("model.layers.0.mlp.shared_mlp.down_proj.weight", "shared expert"),
    ("model.layers.0.mlp.shared_expert_gate.weight", "gate of the shared expert"),
    ("model.layers.0.mlp.gate.weight", "router"),
    ("model.layers.0.mlp.router.weight", "router"),
    ("model.layers.0.block_sparse_moe.gate.weight", "router"),
    ("model.layers.0.mlp.gate.e_score_correction_bias", "score correction"),  # B37
    ("model.visual.blocks.0.mlp.gate_proj.weight", "tower"),  # B22
    ("visual.blocks.0.mlp.up_proj.bias", "tower"),
    ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "tower"),
    ("model.audio_tower.layers.0.fc1.weight", "tower"),
    ("model.layers.0.linear_attn.in_proj_ba.weight", "linear attention"),  # B31
    ("model.layers.0.mlp.experts.gate_up_proj_bias", "expert bias"),
    ("model.layers.0.mlp.experts.0.down_proj.bias", "expert bias"),
    ("model.layers.0.mlp.experts.0.down_proj.weight_scale_inv", "quantisation"),
    ("model.layers.0.mlp.down_proj.weight_scale", "quantisation"),
    ("model.layers.0.mixer.in_proj.weight", "not a feed-forward projection"),
    ("model.layers.0.mixer.D", "not a feed-forward projection"),
    ("model.layers.0.mlp.gate_projector.weight", "not a feed-forward projection"),
]


@pytest.mark.parametrize(("name", "reason"), FEED_FORWARD)
def test_feed_forward_names(name, reason):
    found = classify(name)
    assert found.kind is ClassKind.FEED_FORWARD
    assert reason in found.reason


@pytest.mark.parametrize(("name", "reason"), LEFTOVER)
def test_leftover_names_with_their_reasons(name, reason):
    found = classify(name)
    assert found.kind is ClassKind.LEFTOVER
    assert reason in found.reason


@pytest.mark.parametrize("part", ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"])
def test_b20_interleaved_experts_are_leftover_by_architecture(part):
    found = classify(f"model.layers.0.mlp.experts.{part}", "GptOssForCausalLM")
    assert found.kind is ClassKind.LEFTOVER
    assert "alternate" in found.reason


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("base_model.model.model.layers.0.mlp.down_proj.base_layer.weight", ClassKind.WRAPPED),
        ("base_model.model.model.layers.0.mlp.up_proj.weight", ClassKind.WRAPPED),
        ("model.layers.0.mlp.down_proj.lora_A.default.weight", ClassKind.ADAPTER),
        ("model.layers.0.mlp.down_proj.lora_B.weight", ClassKind.ADAPTER),
        ("model.embed_tokens.lora_embedding_A.default", ClassKind.ADAPTER),
    ],
)
def test_b58_lora_names_never_count_as_weights(name, kind):
    assert classify(name).kind is kind


def test_b17_a_numbered_draft_layer_is_told_by_its_marks():
    names = [
        "model.layers.60.mlp.down_proj.weight",
        "model.layers.61.eh_proj.weight",
        "model.layers.61.mlp.experts.0.down_proj.weight",
        "model.layers.6.mlp.down_proj.weight",
    ]
    drafts = draft_layers(names)
    kinds = [classify(name, "DeepseekV3ForCausalLM", drafts).kind for name in names]
    leftover, direct = ClassKind.LEFTOVER, ClassKind.FEED_FORWARD
    assert kinds == [direct, leftover, leftover, direct]


def test_expert_groups_are_one_layers_experts():
    assert expert_group("model.layers.0.mlp.experts.3.up_proj.weight") == "model.layers.0.mlp.experts"
    assert expert_group("model.layers.0.mlp.experts.gate_up_proj_bias") == "model.layers.0.mlp.experts"
    assert expert_group("model.layers.0.mlp.shared_experts.up_proj.weight") is None
    assert expert_group("model.layers.0.mlp.gate.weight") is None


def test_b77_time_grows_with_the_number_of_names_only():
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
        for layer in range(48)
        for expert in range(128)
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    start = time.perf_counter()
    assert all(classify(name).kind is ClassKind.FEED_FORWARD for name in names)
    assert time.perf_counter() - start < 2.0
