"""Merging manifests: what is accepted, and every fault in one error."""

import json

import pytest
from equipment.declaring import catalog, layout, manifests, rows, shard_of

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.catalog import merge
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.shard import LocalShard, StorageView
from nemo_rl_reshard.params.spec import TensorSpec

SPEC = TensorSpec("model.layers.0.mlp.down_proj.weight", (4, 2), "float32")
NORM = TensorSpec("model.norm.weight", (2,), "float32")


def test_equal_layouts_are_one_object_and_order_of_manifests_does_not_matter():
    other = TensorSpec("model.layers.1.mlp.down_proj.weight", (4, 2), "float32")
    tensors = [(SPEC, layout((4, 2), (2,), "S(0)", (0, 1))), (other, rows((4, 2), {1: [(2, 2)], 0: [(0, 2)]}))]
    declared = manifests(Side.TRAINER, (0, 1), tensors)
    merged = merge(declared[::-1])
    assert merged.layouts[SPEC.name] is merged.layouts[other.name]
    assert merged == merge(declared)
    assert merged.ranks == (0, 1)


def test_adjacent_shards_of_one_rank_may_come_in_any_order():
    first, second = Region((0, 0), (1, 2)), Region((1, 0), (3, 2))
    one = merge([Manifest(0, Side.TRAINER, (SPEC,), (shard_of(SPEC.name, second), shard_of(SPEC.name, first)))])
    assert one.layouts[SPEC.name].regions_of(0) == (first, second)


def test_a_rank_that_holds_nothing_is_kept_and_its_empty_shards_are_dropped():
    empty = LocalShard(SPEC.name, Region((4, 0), (0, 2)), StorageView("w", 0, (0, 2), (2, 1)))
    merged = merge(
        [
            Manifest(0, Side.TRAINER, (SPEC,), (shard_of(SPEC.name, Region.whole((4, 2))),)),
            Manifest(1, Side.TRAINER, (SPEC,), (empty,)),
        ]
    )
    assert merged.ranks == (0, 1)
    assert merged.layouts[SPEC.name].ranks == (0,)


def test_gaps_are_faults_for_trainers_and_allowed_for_inference():
    part = [(SPEC, rows((4, 2), {0: [(0, 1)], 1: [(3, 1)]}))]
    with pytest.raises(DeclarationError, match=r"no rank holds elements \[1:3, 0:2\]"):
        catalog(Side.TRAINER, (0, 1), part)
    assert catalog(Side.INFERENCE, (0, 1), part).layouts[SPEC.name].ranks == (0, 1)


def test_all_faults_come_in_one_error():
    whole = shard_of(SPEC.name, Region.whole((4, 2)))
    wrong = TensorSpec(SPEC.name, (8, 2), "float32")
    outside = shard_of(NORM.name, Region((1,), (2,)))
    crooked = LocalShard(SPEC.name, Region((0, 0), (1, 2)), StorageView("w", 0, (2, 1), (1, 1)))
    declared = [
        Manifest(0, Side.TRAINER, (SPEC, NORM), (whole, outside), (("lm_head.weight", "tied"),)),
        Manifest(1, Side.TRAINER, (wrong, NORM), (crooked, shard_of("nobody", Region((0,), (1,))))),
        Manifest(1, Side.INFERENCE, (), ()),
        Manifest(2, Side.TRAINER, (SPEC,), (whole, shard_of(SPEC.name, Region((3, 0), (1, 2))))),
    ]
    with pytest.raises(DeclarationError) as caught:
        merge(declared)
    text = str(caught.value)
    for part in (
        "rank 1 declares twice",
        "rank 1 is on side inference",
        f"{SPEC.name}: rank 0 declares shape (4, 2) float32, rank 1 declares shape (8, 2)",
        f"{NORM.name}: rank 0 gives region [1:3], outside shape (2,)",
        f"{SPEC.name}: rank 2 gives elements [3:4, 0:2] twice",
        "nobody: ranks [1] give shards of it without naming",
        "view of extent (2, 1)",
        "lm_head.weight: rank 0 calls it indirect without naming",
    ):
        assert part in text
    assert "8 faults" in text


def test_dtype_disagreement_names_both_ranks():
    half = TensorSpec(SPEC.name, SPEC.shape, "bfloat16")
    with pytest.raises(DeclarationError, match=r"rank 3 declares shape \(4, 2\) float32, rank 5 .* bfloat16"):
        merge([Manifest(3, Side.INFERENCE, (SPEC,), ()), Manifest(5, Side.INFERENCE, (half,), ())])


def test_unknown_dtype_is_refused_by_name():
    with pytest.raises(DeclarationError, match="w: unknown dtype 'float8_e4m3fn'; known are"):
        TensorSpec("w", (2,), "float8_e4m3fn")


def test_one_fault_that_many_tensors_share_is_told_once():
    specs = [TensorSpec(f"model.layers.{index}.mlp.up_proj.weight", (4, 2), "float32") for index in range(20)]
    with pytest.raises(DeclarationError) as caught:
        catalog(Side.TRAINER, (0,), [(spec, rows((4, 2), {0: [(0, 3)]})) for spec in specs])
    assert "and 12 more alike: no rank holds elements [3:4, 0:2]" in str(caught.value)
    assert "1 fault\n" in str(caught.value)


def test_no_manifest_at_all_is_refused():
    with pytest.raises(DeclarationError, match="no rank declared anything"):
        merge([])


def test_b27_one_rank_with_the_same_expert_in_two_slots_is_refused():
    spec = TensorSpec("model.layers.0.mlp.experts.0.up_proj.weight", (4, 2), "float32")
    shard = shard_of(spec.name, Region.whole((4, 2)))
    with pytest.raises(DeclarationError, match=r"rank 1 gives elements .* twice"):
        merge([Manifest(1, Side.INFERENCE, (spec,), (shard, shard))])


def test_manifests_survive_json_and_malformed_ones_are_refused():
    declared = manifests(Side.TRAINER, (0, 1), [(SPEC, layout((4, 2), (2,), "S(1)", (0, 1)))], {SPEC.name: "computed"})
    for manifest in declared:
        plain = json.loads(json.dumps(manifest.to_plain()))
        assert Manifest.from_plain(plain) == manifest
    del plain["side"]
    with pytest.raises(DeclarationError, match="malformed manifest"):
        Manifest.from_plain(plain)


def test_first_reason_for_indirect_wins_and_follows_model_order():
    declared = [
        Manifest(0, Side.INFERENCE, (SPEC, NORM), (), ((NORM.name, "adds one"), (SPEC.name, "reshaped"))),
        Manifest(1, Side.INFERENCE, (SPEC, NORM), (), ((NORM.name, "other words"),)),
    ]
    assert list(merge(declared).indirect.items()) == [(SPEC.name, "reshaped"), (NORM.name, "adds one")]
