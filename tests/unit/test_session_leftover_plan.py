"""Batches of leftovers: bounded, groups whole, every element contributed once, the load spread."""

from __future__ import annotations

import json
from typing import Any

import pytest
from equipment.layout_cases import LAYOUT_CASES, LayoutCase
from equipment.refit_worlds import mesh_layout

from nemo_rl_reshard.errors import PlanError, ReshardError
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import gaps, overlaps
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.runtime.leftover_plan import ALIGNMENT, LeftoverProgram, atomic_group, plan_leftovers


def sharded(names_and_bytes: list[tuple[str, int]], bucket_bytes: int) -> LeftoverProgram:
    """uint8 vectors over two trainers."""
    specs = [TensorSpec(name, (nbytes,), "uint8") for name, nbytes in names_and_bytes]
    held = {spec.name: mesh_layout(spec.shape, (2,), range(2), "S(0)") for spec in specs}
    return plan_leftovers(specs, held, (0, 1), (2, 3, 4), bucket_bytes=bucket_bytes)


def names_of(program: LeftoverProgram) -> list[list[str]]:
    return [[spec.name for spec in batch.specs] for batch in program.batches]


def test_a_tensor_larger_than_the_buffer_is_a_batch_of_its_own() -> None:
    """`B39`."""
    program = sharded([("a", 16), ("b", 100), ("c", 16)], bucket_bytes=64)
    assert names_of(program) == [["a"], ["b"], ["c"]]


def test_small_tensors_share_a_batch() -> None:
    program = sharded([("a", 16), ("b", 16), ("c", 16), ("d", 16)], bucket_bytes=4 * 32)
    assert names_of(program) == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_an_empty_bucket_is_refused(bucket_bytes: int) -> None:
    """`B39`."""
    with pytest.raises(ValueError, match="must be positive"):
        sharded([("a", 16)], bucket_bytes)


def test_groups_are_never_cut() -> None:
    """`B21`, `B57`: experts of a layer, and draft layers, in one load; every name in exactly one batch."""
    experts = [
        f"model.layers.1.mlp.experts.{expert}.{kind}_proj.weight"
        for expert in range(4)
        for kind in ("gate", "up", "down")
    ]
    names = ["model.embed_tokens.weight", *experts, "mtp.0.w", "model.norm.weight", "mtp.1.w"]
    program = sharded([(name, 16) for name in names], bucket_bytes=4 * 5 * 16)
    batches = names_of(program)
    assert experts in batches
    (drafts,) = [batch for batch in batches if "mtp.0.w" in batch]
    assert "mtp.1.w" in drafts
    assert sorted(name for batch in batches for name in batch) == sorted(names)
    assert atomic_group("model.norm.weight") != atomic_group("model.embed_tokens.weight")


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
def test_every_element_is_contributed_once_by_a_holder(case: LayoutCase) -> None:
    """`B03`, `B06`: over the layout table, empty ranks and replicas included."""
    layout = mesh_layout(case.shape, case.mesh, case.mesh_ranks, *case.placements)
    spec = TensorSpec("w", case.shape, "float32")
    program = plan_leftovers([spec], {"w": layout}, range(case.size), (case.size,), bucket_bytes=1 << 20)
    (batch,) = program.batches
    regions = [piece.region for piece in batch.pieces]
    assert not gaps(Region.whole(case.shape), regions)
    assert not overlaps(regions)
    for piece in batch.pieces:
        assert any(held.contains(piece.region) for held in layout.regions_of(piece.rank))
        assert piece.share_offset % ALIGNMENT == 0
        assert piece.share_offset + piece.region.numel * 4 <= batch.share_nbytes


def test_replicas_share_the_sending() -> None:
    """HSDP 2 x 3: with four tensors every trainer contributes, the busiest not more than twice the mean."""
    specs = [TensorSpec(f"w{index}", (6, 4), "float32") for index in range(4)]
    layout = mesh_layout((6, 4), (2, 3), range(6), "R", "S(0)")
    program = plan_leftovers(
        specs, dict.fromkeys((s.name for s in specs), layout), range(6), (6,), bucket_bytes=1 << 20
    )
    sent = dict.fromkeys(range(6), 0)
    for piece in program.batches[0].pieces:
        sent[piece.rank] += piece.region.numel
    assert set(sent.values()) == {16}


def test_padding_of_the_source_stays_at_home() -> None:
    """`B35`: the wire shape is the target's, 5 of 6 rows."""
    program = plan_leftovers(
        [TensorSpec("w", (5, 2), "float32")],
        {"w": mesh_layout((6, 2), (3,), range(3), "S(0)")},
        range(3),
        (3,),
        bucket_bytes=1024,
    )
    assert sum(piece.region.numel for piece in program.batches[0].pieces) == 10


def test_a_gap_is_an_error() -> None:
    held = TensorLayout.from_regions((4,), {0: [Region((0,), (3,))]})
    with pytest.raises(PlanError, match="do not hold all of its 4 elements"):
        plan_leftovers([TensorSpec("w", (4,), "float32")], {"w": held}, (0,), (1,), bucket_bytes=1024)


def test_what_all_are_told_and_a_ranks_share_make_its_program() -> None:
    program = sharded([("a", 16), ("b", 100)], bucket_bytes=64)
    common = LeftoverProgram.from_plain(json.loads(json.dumps(program.to_plain())))
    shares = json.loads(json.dumps(list(program.shares().items())))
    assert [rank for rank, _ in shares] == [0, 1], "only trainers have one"
    (_, of_root), (_, of_other) = shares
    assert common.with_share(of_root) == program, "the root knows all pieces"
    other = common.with_share(of_other)
    for mine, whole in zip(other.batches, program.batches, strict=True):
        assert mine.pieces == tuple(piece for piece in whole.pieces if piece.rank == 1)
    assert not any(batch.pieces for batch in common.batches)
    assert common.digest == program.digest != sharded([("a", 16)], 64).digest


@pytest.mark.parametrize("share", [[], [[]], [[], [[1, 2]]], [[], 7], [[], [[0, [0], [], 1, 0]]]])
def test_a_malformed_share_is_refused(share: list[Any]) -> None:
    program = sharded([("a", 16), ("b", 100)], bucket_bytes=64)
    assert len(program.batches) == 2
    with pytest.raises(ReshardError, match=r"malformed share|region"):
        program.with_share(share)
