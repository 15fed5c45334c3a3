"""Matching the two sides: names, shapes, dtypes, padding, skips."""

import pytest
from equipment.declaring import catalog, layout, rows

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.match import allowed_skips, check_match
from nemo_rl_reshard.params.spec import TensorSpec

GATE = "model.layers.0.mlp.gate_proj.weight"


def side(which, tensors, ranks=None, indirect=None):
    """A catalog from name -> (shape, dtype), everything whole on the first rank."""
    ranks = ranks or ((0, 1) if which is Side.TRAINER else (2, 3))
    made = [
        (TensorSpec(name, shape, dtype), layout(shape, (1,), "R", ranks[:1]))
        for name, (shape, dtype) in tensors.items()
    ]
    return catalog(which, ranks, made, indirect)


def test_equal_declarations_match():
    same = {GATE: ((4, 2), "float32")}
    check_match(side(Side.TRAINER, same), side(Side.INFERENCE, same))


def test_b22_names_on_one_side_only_list_both_sets():
    source = {"model.visual.blocks.0.mlp.gate_proj.bias": ((4,), "float32"), GATE: ((4, 2), "float32")}
    target = {"language_model." + GATE: ((4, 2), "float32")}
    with pytest.raises(DeclarationError) as caught:
        check_match(side(Side.TRAINER, source), side(Side.INFERENCE, target))
    text = str(caught.value)
    assert f"only trainers declare {sorted(source)}" in text
    assert f"only inference declares {list(target)}" in text


def test_b11_a_local_shard_taken_for_the_whole_is_named_with_its_rank():
    with pytest.raises(DeclarationError) as caught:
        check_match(side(Side.TRAINER, {GATE: ((4, 2), "float32")}), side(Side.INFERENCE, {GATE: ((4, 4), "float32")}))
    text = str(caught.value)
    for part in (GATE, "(4, 2)", "(4, 4)", "ranks [0] give a plain tensor as the whole", "declare its placement"):
        assert part in text


def test_b35_padded_vocabulary_is_accepted_only_when_declared():
    name = "lm_head.weight"
    source = side(Side.TRAINER, {name: ((104, 2), "float32")})
    target = side(Side.INFERENCE, {name: ((101, 2), "float32")})
    with pytest.raises(DeclarationError, match="if the trainers pad it, declare the true shape"):
        check_match(source, target)
    with pytest.raises(DeclarationError, match=r"the declared true shape is \(102, 2\)"):
        check_match(source, target, padded={name: (102, 2)})
    check_match(source, target, padded={name: (101, 2)})
    with pytest.raises(DeclarationError, match="both must give the checkpoint's shape"):
        check_match(
            side(Side.TRAINER, {name: ((104, 2), "float32")}),
            side(Side.INFERENCE, {name: ((101, 3), "float32")}),
            padded={name: (101, 3)},
        )


def test_b17_draft_layers_may_be_skipped_when_the_engine_has_no_drafter():
    tensors = {GATE: ((4, 2), "float32"), "mtp.layers.0.mlp.down_proj.weight": ((2, 4), "float32")}
    source, target = side(Side.TRAINER, tensors), side(Side.INFERENCE, {GATE: ((4, 2), "float32")})
    skips = allowed_skips(source, target)
    assert list(skips) == ["mtp.layers.0.mlp.down_proj.weight"]
    assert "no drafter" in skips["mtp.layers.0.mlp.down_proj.weight"]
    check_match(source, target)
    check_match(source, target, skipped=skips)
    with pytest.raises(DeclarationError, match="names differ"):
        check_match(source, target, skipped={})


def test_b58_adapters_may_be_skipped_and_wrapper_names_may_not():
    adapter = "model.layers.0.mlp.down_proj.lora_A.default.weight"
    source = side(Side.TRAINER, {GATE: ((4, 2), "float32"), adapter: ((1, 2), "float32")})
    target = side(Side.INFERENCE, {GATE: ((4, 2), "float32")})
    assert list(allowed_skips(source, target)) == [adapter]
    wrapped = side(Side.TRAINER, {"model.layers.0.mlp.down_proj.base_layer.weight": ((2, 2), "float32")})
    assert allowed_skips(wrapped, target) == {}


def test_b33_a_head_that_inference_does_not_know_is_never_dropped():
    tensors = {GATE: ((4, 2), "float32"), "lm_head.weight": ((6, 2), "float32")}
    with pytest.raises(DeclarationError, match=r"only trainers declare \['lm_head.weight'\]"):
        check_match(side(Side.TRAINER, tensors), side(Side.INFERENCE, {GATE: ((4, 2), "float32")}))


def test_floats_are_cast_and_integers_are_not():
    check_match(side(Side.TRAINER, {GATE: ((2,), "float32")}), side(Side.INFERENCE, {GATE: ((2,), "bfloat16")}))
    with pytest.raises(DeclarationError, match="trainers hold int64, inference wants bfloat16; only floats are cast"):
        check_match(side(Side.TRAINER, {GATE: ((2,), "int64")}), side(Side.INFERENCE, {GATE: ((2,), "bfloat16")}))


def test_ranks_on_both_sides_need_the_word_colocated():
    tensors = {GATE: ((4, 2), "float32")}
    source, target = side(Side.TRAINER, tensors), side(Side.INFERENCE, tensors, ranks=(1, 2))
    with pytest.raises(DeclarationError, match=r"ranks \[1\] are on both sides"):
        check_match(source, target)
    check_match(source, target, colocated=True)


def test_a_tensor_that_no_inference_rank_needs_is_a_fault_unless_it_is_indirect():
    source = side(Side.TRAINER, {GATE: ((4, 2), "float32")})
    made = [(TensorSpec(GATE, (4, 2), "float32"), rows((4, 2), {}))]
    with pytest.raises(DeclarationError, match="no inference rank needs any element"):
        check_match(source, catalog(Side.INFERENCE, (2, 3), made))
    check_match(source, catalog(Side.INFERENCE, (2, 3), made, {GATE: "the loader adds one"}))


def test_all_mismatches_come_in_one_error():
    source = side(Side.TRAINER, {"a": ((4, 2), "float32"), "b": ((2,), "int8"), "c": ((2,), "float32")})
    target = side(Side.INFERENCE, {"a": ((2, 4), "float32"), "b": ((2,), "float32")}, ranks=(0, 3))
    with pytest.raises(DeclarationError, match="4 faults"):
        check_match(source, target)
