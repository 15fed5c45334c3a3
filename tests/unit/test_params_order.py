"""Model order out of the orders of single ranks."""

from nemo_rl_reshard.params.order import model_order


def test_one_sequence_is_kept():
    assert model_order([["b", "a", "c"]]) == ["b", "a", "c"]


def test_experts_of_other_ranks_fall_into_their_layer():
    def of_rank(expert):
        names = ["embed"]
        for layer in range(2):
            names += [f"layers.{layer}.attn", f"layers.{layer}.experts.{expert}.up", f"layers.{layer}.norm"]
        return [*names, "head"]

    order = model_order([of_rank(0), of_rank(1)])
    assert order == [
        "embed",
        *(
            name
            for layer in range(2)
            for name in (
                f"layers.{layer}.attn",
                f"layers.{layer}.experts.0.up",
                f"layers.{layer}.experts.1.up",
                f"layers.{layer}.norm",
            )
        ),
        "head",
    ]


def test_ranks_without_common_tensors_are_ordered_by_layer():
    assert model_order([["m.0.e", "m.2.e"], ["m.1.e", "m.3.e"]]) == ["m.0.e", "m.1.e", "m.2.e", "m.3.e"]


def test_pipeline_stages_follow_each_other_and_the_last_keeps_its_head():
    assert model_order([["x.4.w", "x.5.w", "head"], ["embed", "x.0.w", "x.1.w"]]) == [
        "embed",
        "x.0.w",
        "x.1.w",
        "x.4.w",
        "x.5.w",
        "head",
    ]


def test_contradicting_sequences_still_give_every_name_once():
    assert sorted(model_order([["a", "b", "c"], ["c", "a", "d"]])) == ["a", "b", "c", "d"]
