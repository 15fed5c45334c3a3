"""A trainer declares exactly what torch placed: every case of the layout table on real gloo processes, twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equipment.layout_cases import LAYOUT_CASES, LayoutCase, layout_case
from equipment.reassembly import reassemble
from equipment.trainers import grid, placed_as, run_trainers

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.params.manifest import Manifest
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.live import NamedTensors

WORLD = 6
HELD = [case for case in LAYOUT_CASES if case.ascends]


def _declare_cases(rank: int, size: int) -> dict[str, dict[str, Any]]:
    """Per case: this rank's manifest, what its views show before and after a change, and torch's own whole tensor."""
    found = {}
    for case in HELD:
        mesh = grid(case.mesh, case.axes, case.mesh_ranks)
        tensor = placed_as(case, _coded(case), mesh)
        source = DTensorSource(NamedTensors({"weight": tensor}), rank)
        manifest = source.manifest(rank)
        passes = []
        for _ in range(2):
            shown = [(shard.region, source.view("weight", shard.region).clone()) for shard in manifest.shards]
            whole = tensor.full_tensor().clone() if mesh.get_coordinate() is not None else None
            passes.append((shown, whole))
            tensor.to_local().mul_(-3)
        found[case.name] = {"manifest": manifest, "passes": passes}
    refused = layout_case("reversed_ranks")
    tensor = placed_as(refused, _coded(refused), grid(refused.mesh, refused.axes, refused.mesh_ranks))
    try:
        DTensorSource(NamedTensors({"weight": tensor}), rank)
    except DeclarationError as fault:
        found["reversed_ranks"] = {"fault": str(fault)}
    return found


def _coded(case: LayoutCase) -> torch.Tensor:
    return torch.arange(1, torch.Size(case.shape).numel() + 1, dtype=torch.float32).view(case.shape)


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder: Path = tmp_path_factory.mktemp("layouts")
    return run_trainers(WORLD, _declare_cases, folder)


@pytest.mark.parametrize("case", HELD, ids=lambda case: case.name)
def test_declared_regions_rebuild_the_tensor(case: LayoutCase, declared: list[dict[str, dict[str, Any]]]) -> None:
    """B01 B02 B03 B04 B05 B06 B07: by value, against torch's own gather, each element once per replica group."""
    for turn, factor in enumerate((1, -3)):
        shown = [declared[rank][case.name]["passes"][turn][0] for rank in range(WORLD)]
        oracle = declared[case.mesh_ranks[0]][case.name]["passes"][turn][1]
        assert torch.equal(oracle, _coded(case) * factor)
        assert torch.equal(reassemble(case.shape, shown), oracle)


@pytest.mark.parametrize("case", [case for case in LAYOUT_CASES if case.regions], ids=lambda case: case.name)
def test_measured_regions_hold(case: LayoutCase, declared: list[dict[str, dict[str, Any]]]) -> None:
    """B01 B02: the very rows that torch was measured to hold, and nothing on an empty rank."""
    for rank, expected in enumerate(case.regions or ()):
        manifest: Manifest = declared[rank][case.name]["manifest"]
        assert tuple((shard.region.offset, shard.region.extent) for shard in manifest.shards) == expected


def test_ranks_that_descend_are_refused(declared: list[dict[str, dict[str, Any]]]) -> None:
    """torch gathers such a tensor in the wrong order, so nobody can say which shard is whose."""
    assert "weight: ranks of mesh [2, 1, 0] do not ascend" in declared[0]["reversed_ranks"]["fault"]


def test_a_rank_outside_the_mesh_takes_no_part(declared: list[dict[str, dict[str, Any]]]) -> None:
    manifest: Manifest = declared[5]["rows_even"]["manifest"]
    assert manifest.specs == ()
    assert manifest.shards == ()


def test_an_empty_rank_takes_part_without_a_shard(declared: list[dict[str, dict[str, Any]]]) -> None:
    """B03: it knows the tensor, so it joins every agreement about it."""
    manifest: Manifest = declared[3]["rows_empty_rank"]["manifest"]
    assert [spec.shape for spec in manifest.specs] == [(5, 2)]
    assert manifest.shards == ()


def test_replicas_are_the_ranks_of_equal_regions(declared: list[dict[str, dict[str, Any]]]) -> None:
    """B06: {0, 2} and {1, 3}, never 0 with 1."""
    regions = [declared[rank]["hsdp_uneven"]["manifest"].shards[0].region for rank in range(4)]
    assert regions[0] == regions[2] != regions[1] == regions[3]
