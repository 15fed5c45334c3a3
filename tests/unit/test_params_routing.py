"""Routes: what goes direct under each policy, and why the rest does not."""

import pytest
from equipment.declaring import catalog, layout

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.routing import RouteKind, RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec

LAYER = "model.layers.0."
DIRECT, LEFTOVER, SKIP = RouteKind.DIRECT, RouteKind.LEFTOVER, RouteKind.SKIP


def routes(names, policy, source_indirect=None, target_indirect=None, only_source=(), architecture=None):
    def side(which, ranks, found, indirect):
        made = [(TensorSpec(name, (4, 2), "float32"), layout((4, 2), (1,), "R", ranks)) for name in found]
        return catalog(which, ranks, made, indirect)

    source = side(Side.TRAINER, (0,), [*names, *only_source], source_indirect)
    target = side(Side.INFERENCE, (1,), names, target_indirect)
    return decide_routes(source, target, policy, architecture)


def kinds(found):
    return {name.removeprefix(LAYER): route.kind for name, route in found.items()}


NAMES = [LAYER + "self_attn.q_proj.weight", LAYER + "mlp.gate.weight", LAYER + "mlp.down_proj.weight"]


def test_ffn_sends_feed_forward_only():
    assert list(kinds(routes(NAMES, RoutePolicy.FFN)).values()) == [LEFTOVER, LEFTOVER, DIRECT]


def test_all_sends_whatever_both_sides_prove():
    assert set(kinds(routes(NAMES, RoutePolicy.ALL)).values()) == {DIRECT}


@pytest.mark.parametrize("policy", list(RoutePolicy))
def test_b23_an_indirect_tensor_of_either_side_is_leftover_with_that_sides_reason(policy):
    found = routes(NAMES, policy, {NAMES[2]: "export adds one"}, {NAMES[0]: "the loader reshapes it"})
    assert found[NAMES[2]].kind is LEFTOVER
    assert found[NAMES[2]].reason == "trainer: export adds one"
    assert found[NAMES[0]].reason == "inference: the loader reshapes it"


def test_b17_draft_layers_are_leftover_with_a_drafter_and_skipped_without():
    draft = "mtp.layers.0.mlp.down_proj.weight"
    assert routes([draft], RoutePolicy.FFN)[draft].kind is LEFTOVER
    without = routes(NAMES, RoutePolicy.FFN, only_source=[draft])
    assert without[draft].kind is SKIP
    assert "draft" in without[draft].reason


def test_b18_b37_shared_experts_routers_and_score_biases_take_the_leftover_route():
    names = [
        LAYER + "mlp.shared_expert.gate_proj.weight",
        LAYER + "mlp.shared_expert_gate.weight",
        LAYER + "mlp.gate.weight",
        LAYER + "mlp.gate.e_score_correction_bias",
    ]
    assert set(kinds(routes(names, RoutePolicy.FFN)).values()) == {LEFTOVER}


def test_b20_interleaved_experts_go_together_with_their_biases():
    names = [LAYER + f"mlp.experts.{part}" for part in ("gate_up_proj", "gate_up_proj_bias", "down_proj_bias")]
    assert set(kinds(routes(names, RoutePolicy.FFN, architecture="GptOssForCausalLM")).values()) == {LEFTOVER}
    # Without knowing the architecture, the biases that must go as leftovers take their experts along.
    found = routes(names, RoutePolicy.FFN)
    assert set(kinds(found).values()) == {LEFTOVER}
    assert f"goes with {names[1]}" in found[names[0]].reason


@pytest.mark.parametrize("policy", list(RoutePolicy))
def test_b21_one_indirect_expert_takes_its_whole_layer_along_and_no_other(policy):
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
        for layer in range(2)
        for expert in range(4)
        for part in ("gate_proj", "up_proj", "down_proj")
    ]
    found = routes(names, policy, target_indirect={names[4]: "the loader fuses it"})
    assert set(found) == set(names)
    assert {found[name].kind for name in names[:12]} == {LEFTOVER}
    assert {found[name].kind for name in names[12:]} == {DIRECT}


def test_b22_a_vision_mlp_is_not_sent_by_its_suffix():
    name = "model.visual.blocks.0.mlp.gate_proj.weight"
    assert routes([name], RoutePolicy.FFN)[name].kind is LEFTOVER


def test_b31_interleaved_linear_attention_is_leftover():
    name = LAYER + "linear_attn.in_proj_ba.weight"
    assert routes([name], RoutePolicy.FFN)[name].kind is LEFTOVER


@pytest.mark.parametrize("policy", list(RoutePolicy))
def test_b58_adapters_are_skipped_and_counted(policy):
    adapter = LAYER + "mlp.down_proj.lora_A.default.weight"
    found = routes(NAMES, policy, only_source=[adapter])
    assert [name for name, route in found.items() if route.kind is SKIP] == [adapter]


def test_b58_unmerged_wrapper_names_are_one_error():
    names = [f"base_model.model.model.layers.{index}.mlp.down_proj.base_layer.weight" for index in range(2)]
    with pytest.raises(DeclarationError) as caught:
        routes(NAMES, RoutePolicy.ALL, only_source=names)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("policy", list(RoutePolicy))
def test_b33_a_head_known_to_both_sides_always_moves(policy):
    assert routes(["lm_head.weight"], policy)["lm_head.weight"].kind is not SKIP


def test_routes_follow_the_targets_order_then_the_sources():
    found = routes(NAMES, RoutePolicy.ALL, only_source=["mtp.fc.weight"])
    assert list(found) == [*NAMES, "mtp.fc.weight"]
