"""FSDP2 on paper against FSDP2 itself: torch shards position-coded weights on meshes without communication."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from equipment import virtual_models
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.virtual.fsdp2 import fsdp2_source

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
MESHES = [(1, 4, 1), (1, 2, 3), (2, 2, 2), (2, 1, 3), (1, 5, 2)]


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world in which every collective does nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def module_of(model) -> nn.Module:
    """The model as modules, every element of a weight its own number."""
    root = nn.Module()
    for spec in model.specs:
        at = root
        *path, name, _ = spec.name.split(".")
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        layer = nn.Module()
        if len(spec.shape) == 2:
            layer = (nn.Embedding if "embed" in name else nn.Linear)(
                1, 1, **({} if "embed" in name else {"bias": False})
            )
        layer.weight = nn.Parameter(torch.arange(spec.numel, dtype=torch.float32).view(spec.shape))
        at.add_module(name, layer)
    return root


def sharded(model, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallelism by the usual plan, then FSDP2 layer by layer."""
    module = module_of(model)
    plan = {}
    for spec in model.specs:
        path = spec.name.removesuffix(".weight")
        if path.endswith(COLUMNS):
            plan[path] = ColwiseParallel()
        elif path.endswith(("o_proj", "down_proj", "embed_tokens")):
            plan[path] = RowwiseParallel()
    if mesh["tp"].size() > 1:
        parallelize_module(module, mesh["tp"], plan, src_data_rank=None)
    data = mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    for layer in module.model.layers.children():
        fully_shard(layer, mesh=data)
    fully_shard(module, mesh=data)
    return module


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def test_every_rank_holds_what_torch_gives_it_b01_b02_b06(sizes):
    """B01, B02, B06: HSDP, tensor parallelism inside FSDP, uneven and empty shards."""
    replicate, shard, tp = sizes
    model = virtual_models.dense(vocabulary=11)
    world = replicate * shard * tp
    catalog = fsdp2_source(model, world=world, dp_replicate=replicate, dp_shard=shard, tp=tp)
    codes = {spec.name: torch.arange(spec.numel, dtype=torch.float32).view(spec.shape) for spec in model.specs}
    for rank in range(world):
        with rank_of(rank, world), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = DeviceMesh("cpu", torch.arange(world).view(sizes), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
            module = sharded(model, mesh)
            for name, parameter in module.named_parameters():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                expected = [
                    code for r in catalog.layouts[name].regions_of(rank) for code in codes[name][r.slices].flatten()
                ]
                assert sorted(local.flatten().tolist()) == sorted(map(float, expected)), (rank, name)


def test_stacked_experts_are_cut_by_expert_b26():
    """B26: six experts over four ranks as torch.chunk cuts: 2, 2, 2 and none."""
    catalog = fsdp2_source(virtual_models.experts(), world=8, dp_shard=4, tp=2)
    owners = [catalog.layouts[f"model.layers.1.mlp.experts.{e}.gate_proj.weight"].ranks for e in range(6)]
    assert owners == [(0, 1)] * 2 + [(2, 3)] * 2 + [(4, 5)] * 2


def test_experts_over_ep_are_cut_along_dim_1_by_the_other_data_ranks_b26():
    """B26: ep runs fastest among the data ranks, those of all replicas; tensor parallelism copies."""
    catalog = fsdp2_source(virtual_models.experts(), world=12, dp_replicate=2, dp_shard=3, tp=2, ep=3, first_rank=50)
    found = catalog.layouts["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert {rank: [(r.offset, r.extent) for r in regions] for rank, regions in found.held} == {
        52: [((0, 0), (8, 2))],
        53: [((0, 0), (8, 2))],
        58: [((0, 2), (8, 2))],
        59: [((0, 2), (8, 2))],
    }


def test_every_size_that_does_not_fit_is_named():
    with pytest.raises(ConfigError) as caught:
        fsdp2_source(virtual_models.dense(), world=9, dp_replicate=2, dp_shard=2, tp=2, ep=3)
    for part in ("world 9: is not", "ep 3: does not divide the data ranks", "ep 3: the model has 0 experts"):
        assert part in str(caught.value)
