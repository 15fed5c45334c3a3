"""Real Qwen3 models under FSDP2, HSDP and tensor parallelism: what the ranks declare is the model, before and after."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from equipment.reassembly import reassemble
from equipment.trainers import (
    EXPERT_SIZE,
    grid,
    run_trainers,
    shard_columns_and_rows,
    shard_fully,
    tiny_qwen3,
    tiny_qwen3_moe,
    train_one_step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.params.manifest import Manifest
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.live import NamedTensors
from nemo_rl_reshard.sources.replicas import check_replicas

Found = dict[str, Any]


def _sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel on axis `tp` where the mesh has one, fully sharded on the rest."""
    if "tp" in mesh.mesh_dim_names:
        shard_columns_and_rows(model, mesh["tp"])
        shard_fully(model, mesh["dp"])
    else:
        shard_fully(model, mesh)
    return model


@contextmanager
def _no_gather() -> Iterator[None]:
    """Make gathering or `state_dict()` an error: the direct route may use neither."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the direct route gathered a tensor")

    kept = DTensor.full_tensor, DTensor.redistribute, nn.Module.state_dict
    DTensor.full_tensor = DTensor.redistribute = nn.Module.state_dict = refuse
    try:
        yield
    finally:
        DTensor.full_tensor, DTensor.redistribute, nn.Module.state_dict = kept


def _observe(model: nn.Module, rank: int, size: int) -> Found:
    """Declare once; show everything, train a step, show it again. The oracle gathers with torch, in the test only."""
    source = DTensorSource.from_model(model, rank)
    manifest = source.manifest(rank)
    passes = []
    for turn in range(2):
        if turn:
            loss = train_one_step(model)
        before = _fingerprint(model)
        with _no_gather():
            shown = [(shard.tensor, shard.region, source.view(shard.tensor, shard.region)) for shard in manifest.shards]
        kept = [(tensor, region, values.clone()) for tensor, region, values in shown]
        assert _fingerprint(model) == before, "reading changed a weight (B24)"
        whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
        passes.append((kept, whole))
    digests = source.replica_digests(num_trainers=size)
    return {"manifest": manifest, "passes": passes, "loss": loss, "digests": digests, "aliases": source.aliases}


def _fingerprint(model: nn.Module) -> str:
    state = hashlib.blake2b()
    for parameter in model.parameters():
        state.update(parameter.to_local().detach().contiguous().numpy().tobytes())
    return state.hexdigest()


def _on_four(rank: int, size: int) -> dict[str, Found]:
    both, plain = grid((2, 2), ("dp", "tp")), grid((2, 2), ("replica", "shard"))
    found = {
        "dense 2x2": _observe(_sharded(tiny_qwen3(), both), rank, size),
        "moe 2x2": _observe(_sharded(tiny_qwen3_moe(), both), rank, size),
        "dense hsdp": _observe(_sharded(tiny_qwen3(tied=True), plain), rank, size),
        "moe hsdp": _observe(_sharded(tiny_qwen3_moe(), plain), rank, size),
    }
    found["careless"] = _careless(rank, size, both)
    found["masters"] = _masters(rank, grid((4,), ("dp",)))
    found["faults"] = _faults(rank, both)
    found["broken tie"] = _broken_tie(rank, grid((4,), ("dp",)))
    found["uneven tie"] = _uneven_tie(rank, grid((4,), ("dp",)))
    found["padding"] = _padding(rank, grid((4,), ("dp",)))
    return found


def _on_six(rank: int, size: int) -> dict[str, Found]:
    mesh = grid((2, 3), ("dp", "tp"))
    return {
        "dense 2x3": _observe(_sharded(tiny_qwen3(), mesh), rank, size),
        "moe 2x3": _observe(_sharded(tiny_qwen3_moe(), mesh), rank, size),
        "experts 2x3": _experts_by_hand(rank, mesh),
    }


def _careless(rank: int, size: int, mesh: DeviceMesh) -> Found:
    """Head norms left out of the tensor-parallel plan, as is easily done: each tp rank trains a copy of its own."""
    model = tiny_qwen3()
    shard_columns_and_rows(model, mesh["tp"], head_norms=False)
    shard_fully(model, mesh["dp"])
    source = DTensorSource.from_model(model, rank)
    before = source.replica_digests(num_trainers=size)
    train_one_step(model)
    return {"digests": [before, source.replica_digests(num_trainers=size)]}


def _masters(rank: int, mesh: DeviceMesh) -> Found:
    """fp32 masters with bf16 compute; then a forward pass without a backward one, which leaves the root whole."""
    model = tiny_qwen3()
    shard_fully(model, mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    source = DTensorSource.from_model(model, rank)
    manifest = source.manifest(rank)
    with torch.no_grad():
        model(input_ids=torch.arange(6).view(1, 6))
    left_whole = not isinstance(model.lm_head.weight, DTensor)
    shown = [(shard.tensor, shard.region, source.view(shard.tensor, shard.region)) for shard in manifest.shards]
    kept = [(tensor, region, values.clone()) for tensor, region, values in shown]
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    again = DTensorSource.from_model(model, rank).manifest(rank)
    return {"manifest": manifest, "passes": [(kept, whole)], "left whole": left_whole, "same": again == manifest}


def _faults(rank: int, mesh: DeviceMesh) -> Found:
    """Placements that are no weight, a mesh axis of size 1, and a local tensor of another shape than declared."""
    one = mesh["tp"]
    summed = DTensor.from_local(torch.ones(4, 2), one, [Partial()], run_check=False)
    short = DTensor.from_local(
        torch.ones(1, 2), one, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1)
    )
    try:
        DTensorSource(NamedTensors({"mlp.summed": summed, "mlp.short": short}), rank)
    except DeclarationError as fault:
        message = str(fault)
    return {"message": message}


def _broken_tie(rank: int, mesh: DeviceMesh) -> Found:
    """B32: embedding and head sharded in separate groups become two parameters under one tie flag."""
    model = tiny_qwen3(tied=True)
    fully_shard(model.model.embed_tokens, mesh=mesh)
    fully_shard(model, mesh=mesh)
    shared = model.lm_head.weight is model.model.embed_tokens.weight
    try:
        aliases = DTensorSource.from_model(model, rank).aliases
    except DeclarationError as fault:
        return {"shared": shared, "message": str(fault)}
    return {"shared": shared, "aliases": aliases}


class _TiedTable(nn.Module):
    """A table [5, 2] that is embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.embed.weight.copy_(torch.arange(10.0).view(5, 2) / 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))

    def step(self) -> None:
        loss = self(torch.arange(5)).square().sum()
        loss.backward()
        torch.optim.SGD(self.parameters(), lr=0.1).step()


def _uneven_tie(rank: int, mesh: DeviceMesh) -> Found:
    """B12: one SGD step of a tied, unevenly cut table, beside the same step in one process."""
    model, reference = _TiedTable(), _TiedTable()
    fully_shard(model, mesh=mesh)
    source = DTensorSource.from_model(model, rank)
    model.step()
    reference.step()
    shards = source.manifest(rank).shards
    shown = [(shard.tensor, shard.region, source.view(shard.tensor, shard.region).clone()) for shard in shards]
    return {"shown": shown, "reference": reference.embed.weight.detach()}


def _padding(rank: int, mesh: DeviceMesh) -> Found:
    """B04: rows of padding behind the local tensor are poisoned; views may not reach them."""
    model = nn.Linear(2, 5, bias=False)
    fully_shard(model, mesh=mesh)
    local = model.weight.to_local()
    stored = local.untyped_storage().nbytes() // local.element_size()
    with torch.no_grad():
        local.as_strided((stored,), (1,), 0)[local.storage_offset() + local.numel() :] = float("nan")
    source = DTensorSource.from_model(model, rank)
    views = [source.view("weight", shard.region) for shard in source.manifest(rank).shards]
    return {"stored": stored, "numel": sum(view.numel() for view in views), "views": [view.clone() for view in views]}


def _experts_by_hand(rank: int, mesh: DeviceMesh) -> Found:
    """Stacked experts over dp by expert and over tp by row: gate and up of one expert lie on different ranks."""
    model = tiny_qwen3_moe()
    experts = model.model.layers[0].mlp.experts
    whole = {name: parameter.detach().clone() for name, parameter in experts.named_parameters()}
    for leaf, placements in {"gate_up_proj": [Shard(0), Shard(1)], "down_proj": [Replicate(), Shard(2)]}.items():
        placed = distribute_tensor(whole[leaf], mesh, placements, src_data_rank=None)
        setattr(experts, leaf, nn.Parameter(placed))
    source = DTensorSource.from_model(model, rank)
    shards = [shard for shard in source.manifest(rank).shards if "layers.0.mlp.experts" in shard.tensor]
    shown = [(shard.tensor, shard.region, source.view(shard.tensor, shard.region).clone()) for shard in shards]
    return {"shown": shown, "whole": {f"model.layers.0.mlp.experts.{name}": value for name, value in whole.items()}}


def _canonical(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The checkpoint tensors of a gathered model, by plain indexing: the oracle of names."""
    named = {}
    for name, value in whole.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            named[name] = value
            continue
        for expert in range(len(value)):
            halves = {"down_proj": value[expert]}
            if leaf == "gate_up_proj":
                halves = {"gate_proj": value[expert][:EXPERT_SIZE], "up_proj": value[expert][EXPERT_SIZE:]}
            named |= {f"{path}.{expert}.{projection}.weight": part for projection, part in halves.items()}
    return named


def _assert_rebuilt(shown_by_rank: list[list[Any]], whole: dict[str, torch.Tensor]) -> None:
    expected = _canonical(whole)
    per_tensor: dict[str, list[list[Any]]] = {name: [] for name in expected}
    for shown in shown_by_rank:
        held: dict[str, list[Any]] = {}
        for tensor, region, values in shown:
            held.setdefault(tensor, []).append((region, values))
        assert set(held) <= set(expected)
        for tensor, regions in held.items():
            per_tensor[tensor].append(regions)
    for name, value in expected.items():
        assert torch.equal(reassemble(tuple(value.shape), per_tensor[name]), value), name


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_trainers(4, _on_four, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def six(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_trainers(6, _on_six, tmp_path_factory.mktemp("six"))


@pytest.mark.parametrize("model", ["dense 2x2", "moe 2x2", "dense hsdp", "moe hsdp", "dense 2x3", "moe 2x3"])
def test_the_ranks_hold_the_model_before_and_after_a_step(model: str, request: pytest.FixtureRequest) -> None:
    """B01-B06 B19 B24 B76: every tensor by value and once per replica group; a step shows without a new declaration."""
    ranks = request.getfixturevalue("six" if "2x3" in model else "four")
    wholes = []
    for turn in range(2):
        whole = ranks[0][model]["passes"][turn][1]
        _assert_rebuilt([rank[model]["passes"][turn][0] for rank in ranks], whole)
        wholes.append(whole)
    assert all(
        not torch.equal(wholes[0][name], wholes[1][name])
        for name in ("lm_head.weight", "model.norm.weight")
        if name in wholes[0]
    )
    assert all(torch.isfinite(value).all() for value in wholes[1].values())
    specs = [rank[model]["manifest"].specs for rank in ranks]
    assert all(found == specs[0] for found in specs)
    assert {spec.name: spec.shape for spec in specs[0]} == {
        name: tuple(value.shape) for name, value in _canonical(wholes[0]).items()
    }


@pytest.mark.parametrize("model", ["dense 2x2", "moe 2x3"])
def test_tensors_on_sub_meshes_are_proven_replicas(model: str, request: pytest.FixtureRequest) -> None:
    """Norms live on the dp axis alone: tp siblings hold the same regions, and the digests say the same values."""
    ranks = request.getfixturevalue("six" if "2x3" in model else "four")
    digests = {rank: found[model]["digests"] for rank, found in enumerate(ranks)}
    hashed = {entry.tensor for entry in digests[0]}
    assert "model.norm.weight" in hashed
    assert "model.layers.0.self_attn.q_proj.weight" not in hashed
    check_replicas(digests)


def test_copies_that_drifted_apart_are_found(four: list[dict[str, Found]]) -> None:
    """A fault of the training set-up: placements and shapes agree, the values of tp siblings do not after a step."""
    before, after = ({rank: found["careless"]["digests"][turn] for rank, found in enumerate(four)} for turn in (0, 1))
    check_replicas(before)
    with pytest.raises(
        DeclarationError, match=r"8 faults\n  - model\.layers\.0\.self_attn\.q_norm\.weight: ranks \[0\] and"
    ):
        check_replicas(after)


def test_a_tie_survives_one_sharding_group(four: list[dict[str, Found]]) -> None:
    """B32: declared once, on HSDP; the alias is listed."""
    found = four[1]["dense hsdp"]
    assert found["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in {spec.name for spec in found["manifest"].specs}


def test_a_tie_broken_by_sharding_is_refused(four: list[dict[str, Found]]) -> None:
    """B32: two groups, two parameters, one flag."""
    for rank in four:
        assert not rank["broken tie"]["shared"]
        assert "lm_head.weight is tied to model.embed_tokens.weight" in rank["broken tie"]["message"]


def test_an_uneven_tied_table_matches_a_single_process(four: list[dict[str, Found]]) -> None:
    """B12: rows that differ point at training, since the views are what training holds; torch 2.13 has none."""
    shown = [[(region, values) for _, region, values in rank["uneven tie"]["shown"]] for rank in four]
    rebuilt, reference = reassemble((5, 2), shown), four[0]["uneven tie"]["reference"]
    stale = [row for row in range(5) if not torch.allclose(rebuilt[row], reference[row], atol=1e-6)]
    assert stale == [], f"rows {stale} were not updated by training: a training-side fault, not one of the refit"
    assert not torch.allclose(rebuilt, torch.arange(10.0).view(5, 2) / 10)


def test_padding_is_never_shown(four: list[dict[str, Found]]) -> None:
    """B03 B04: 2, 2, 1, 0 rows over storage of two rows each; no poisoned element leaves."""
    assert [rank["padding"]["stored"] for rank in four] == [4, 4, 4, 4]
    assert [rank["padding"]["numel"] for rank in four] == [4, 4, 2, 0]
    assert all(torch.isfinite(view).all() for rank in four for view in rank["padding"]["views"])


def test_masters_are_declared_and_shown_in_full_precision(four: list[dict[str, Found]]) -> None:
    """fp32 masters under a bf16 policy, also after a forward pass left the root's bf16 copies in their place."""
    assert all(rank["masters"]["left whole"] for rank in four)
    assert all(rank["masters"]["same"] for rank in four)
    manifests: list[Manifest] = [rank["masters"]["manifest"] for rank in four]
    assert {spec.dtype for manifest in manifests for spec in manifest.specs} == {"float32"}
    shown, whole = [rank["masters"]["passes"][0][0] for rank in four], four[0]["masters"]["passes"][0][1]
    _assert_rebuilt(shown, whole)
    values = dict(tiny_qwen3().named_parameters())
    assert all(torch.equal(whole[name], value) for name, value in values.items())


def test_experts_cut_by_row_fall_apart_into_gate_and_up(six: list[dict[str, Found]]) -> None:
    """B19: with 20 rows over 3 ranks the middle rank holds rows of both projections."""
    _assert_rebuilt([rank["experts 2x3"]["shown"] for rank in six], six[0]["experts 2x3"]["whole"])
    names = {tensor for tensor, _, _ in six[1]["experts 2x3"]["shown"]}
    assert {f"model.layers.0.mlp.experts.0.{projection}_proj.weight" for projection in ("gate", "up", "down")} <= names


def test_faults_name_parameter_rank_expected_and_found(four: list[dict[str, Found]]) -> None:
    """B07 B11: a partial sum is no weight; a local tensor must have the shape that its placements say."""
    for rank, found in enumerate(four):
        message = found["faults"]["message"]
        assert f"rank {rank}: 2 faults" in message
        assert "mlp.summed: placement Partial(sum) on mesh axis 'tp' of size 2: a sum is not a weight" in message
        assert (
            f"mlp.short: of shape (4, 2) under (S(0)) rank {rank} should hold a local tensor of shape (2, 2)" in message
        )
        assert "holds one of shape (1, 2)" in message
