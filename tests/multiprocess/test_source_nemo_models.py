"""Models as NeMo RL's two DTensor workers keep them, in real processes: what an engine holds after each refit.

The oracle gathers with torch and lets the adapter convert, as NeMo RL does, in the test only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equipment.automodel_like import (
    NUM_EXPERTS,
    ComputingAdapter,
    LinearLoRA,
    Model,
    SplitAdapter,
    merged_by_hand,
    shard_experts_apart,
)
from equipment.policy_refits import prepared
from equipment.trainers import grid, run_trainers, shard_columns_and_rows, tiny_qwen3, train_one_step
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.integrations.nemo_rl.policy_source import source_of_policy
from nemo_rl_reshard.params.routing import RouteKind

Found = dict[str, Any]


def _refits(rank: int, size: int, model: nn.Module, change: Callable[[], object], dtype: torch.dtype) -> Found:
    """Two refits to one engine (the last rank) with a training step and a move of every tensor between them."""
    trains = rank < size - 1
    worker = SimpleNamespace(model=model, dtype=dtype, cpu_offload=False, rank=rank)
    world = prepared(rank, size, size - 1, lambda: source_of_policy(worker, rank), dtype)
    found: Found = {"routes": world.routes, "held": [], "expected": []}
    for version in (1, 2):
        before = _bits(model) if trains else b""
        found["held"].append(world.refit(version))
        assert not trains or _bits(model) == before, "a refit changed a weight (B24)"
        if trains:
            found["expected"].append(_as_nemo_rl_sends(model, dtype))
            change()
            _move(model)
    world.close()
    return found


def _train(model: nn.Module) -> None:
    with warnings.catch_warnings():
        # The head's output under tensor parallelism is a view; nothing here writes to it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        train_one_step(model)


def _move(model: nn.Module) -> None:
    """What moving a model from a device to another and back does to its tensors: other storages, buffers swapped."""
    for buffer in model.buffers():
        torch.utils.swap_tensors(buffer, buffer.clone())
    model._apply(lambda tensor: tensor.detach().clone())


def _bits(model: nn.Module) -> bytes:
    tensors = [*model.parameters(), *model.buffers()]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in local)


@torch.no_grad()
def _as_nemo_rl_sends(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Gather, merge, adapt, cast: in this order, each tensor of the state dict."""
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in _state(model).items()
    }
    modules = {_plain(name): module for name, module in model.named_modules()}
    adapter = getattr(model, "state_dict_adapter", None)
    sent = {}
    for name, value in whole.items():
        if ".lora_" in name:
            continue
        module = modules[name.rpartition(".")[0]]
        if isinstance(module, LinearLoRA):
            path = name.removesuffix("weight")
            value = merged_by_hand(value, whole[f"{path}lora_A.weight"], whole[f"{path}lora_B.weight"], module.scale)
        made = [(name, value)] if adapter is None else adapter.convert_single_tensor_to_hf(name, value)
        sent |= {key: made_value.to(dtype).contiguous() for key, made_value in made}
    return sent


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("._checkpoint_wrapped_module", "")


def _first_worker(mesh: DeviceMesh, *, tied: bool, offload: bool = False) -> nn.Module:
    """A Hugging Face model on axes dp, cp, tp: tensor parallel, recomputing, FSDP2 over dp and cp as one."""
    model = tiny_qwen3(tied=tied)
    model.config.use_cache = False  # recomputation would append to the cache
    if mesh["tp"].size() > 1:
        plan = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
        shard_columns_and_rows(model, mesh["tp"])
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp)
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
        layer.input_layernorm = checkpoint_wrapper(layer.input_layernorm)
    both = mesh["dp", "cp"]._flatten("dp_cp")
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=both, offload_policy=policy)
    fully_shard(model, mesh=both, offload_policy=policy)
    if tied:
        model.tie_weights()
    return model


def _first(rank: int, size: int) -> dict[str, Found]:
    """Four trainers and one engine."""
    tensor = grid((1, 2, 2), ("dp", "cp", "tp"))
    wide = grid((2, 2, 1), ("dp", "cp", "tp"))
    found = {}
    for case, mesh, options in (
        ("cp and tp", tensor, {"tied": False}),
        ("tied", wide, {"tied": True}),
        ("offloaded", wide, {"tied": True, "offload": True}),
    ):
        model = _first_worker(mesh, **options) if rank < size - 1 else nn.Module()
        found[case] = _refits(rank, size, model, lambda model=model: _train(model), torch.bfloat16)
    return found


def _second(rank: int, size: int) -> dict[str, Found]:
    """Four trainers and one engine."""
    line, square = grid((4,), ("dp_shard_cp",)), grid((2, 2), ("dp_replicate", "dp_shard_cp"))
    moe, apart = grid((2, 2), ("ep_shard", "ep")), grid((1, 4), ("ep_shard", "ep"))
    found = {}
    for case, dense, experts, options, dtype in (
        ("ep 2, ep_shard 2", line, moe, {"adapter": SplitAdapter()}, torch.bfloat16),
        ("hsdp, ep 4", square, apart, {"adapter": SplitAdapter()}, torch.bfloat16),
        ("computing", line, moe, {"adapter": ComputingAdapter()}, torch.bfloat16),
        ("lora", line, moe, {"adapter": SplitAdapter(), "lora": True}, torch.float32),
        ("lora, computing, hsdp", square, moe, {"adapter": ComputingAdapter(), "lora": True}, torch.float32),
    ):
        model = Model(**options)
        if rank < size - 1:
            shard_experts_apart(model, dense, experts)
        found[case] = _refits(rank, size, model, model.step, dtype)
    both = grid((2, 2), ("dp", "tp"))
    model = Model(SplitAdapter(), lora=True)
    if rank < size - 1:
        _shard_lora_over_columns(model, both)
    found["lora over tp"] = _refits(rank, size, model, model.step, torch.float32)
    found["drifted"] = _drifted(rank, line)
    return found


def _shard_lora_over_columns(model: Model, mesh: DeviceMesh) -> None:
    """Base and one factor by rows over tp and then dp, the other factor whole on tp: three layouts that meet."""
    for layer in model.model.layers:
        for owner, placement in (
            (layer.q_proj, Shard(0)),
            (layer.q_proj.lora_B, Shard(0)),
            (layer.q_proj.lora_A, Replicate()),
        ):
            placed = distribute_tensor(owner.weight.detach(), mesh["tp"], [placement], src_data_rank=None)
            owner.weight = nn.Parameter(placed)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def _drifted(rank: int, mesh: DeviceMesh) -> Found:
    """LoRA whose factors are cut unevenly: rank 3 over four ranks leaves one empty."""
    message = ""
    if rank < 4:
        model = Model(SplitAdapter(), lora=True)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        local = model.model.layers[0].q_proj.lora_A.weight.to_local()
        source = source_of_policy(SimpleNamespace(model=model), rank)
        model.model.layers[0].q_proj.lora_A.weight = nn.Parameter(torch.zeros(2, 12))
        try:
            source.prepare()
        except DeclarationError as fault:
            message = str(fault)
        try:
            source_of_policy(SimpleNamespace(model=model), rank + 1)
        except DeclarationError as fault:
            return {"rows": len(local), "message": message, "misnumbered": str(fault)}
    return {}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_trainers(5, _first, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    return run_trainers(5, _second, tmp_path_factory.mktemp("second"))


def _assert_engine_holds_what_was_sent(ranks: list[dict[str, Found]], case: str, dropped: set[str]) -> None:
    engine = ranks[-1][case]
    for turn in range(2):
        expected = ranks[0][case]["expected"][turn]
        assert set(engine["held"][turn]) == set(expected) - dropped
        for name, value in engine["held"][turn].items():
            assert torch.equal(value, expected[name]), (turn, name)
    moved = [name for name, value in engine["held"][0].items() if not torch.equal(value, engine["held"][1][name])]
    assert len(moved) > len(engine["held"][0]) // 2, "the second refit brought nothing new"


@pytest.mark.parametrize(
    ("case", "dropped"), [("cp and tp", set()), ("tied", {"lm_head.weight"}), ("offloaded", {"lm_head.weight"})]
)
def test_hugging_face_models_of_the_first_worker(first: list[dict[str, Found]], case: str, dropped: set[str]) -> None:
    """B01 B22 B32 B36: strided cuts, context parallelism as part of the data axis, wrappers, one name of a tie."""
    _assert_engine_holds_what_was_sent(first, case, dropped)
    assert set(first[0][case]["routes"].values()) == {RouteKind.DIRECT}


@pytest.mark.parametrize(
    "case", ["ep 2, ep_shard 2", "hsdp, ep 4", "computing", "lora", "lora, computing, hsdp", "lora over tp"]
)
def test_adapted_models_of_the_second_worker(second: list[dict[str, Found]], case: str) -> None:
    """B19 B25 B53 B58: experts over ep and ep_shard, replicas, buffers, LoRA and computed exports, bit for bit."""
    _assert_engine_holds_what_was_sent(second, case, set())
    indirect = {name for name, kind in second[0][case]["routes"].items() if kind is RouteKind.LEFTOVER}
    computed = {"norm.weight", "mlp.router.scale"} if "computing" in case else set()
    computed |= {"q_proj.weight"} if "lora" in case else set()
    assert indirect == {f"model.layers.{layer}.{leaf}" for layer in (0, 1) for leaf in computed}
    experts = [name for name in second[0][case]["routes"] if ".experts." in name]
    assert len(experts) == 2 * NUM_EXPERTS * 3


def test_a_trainer_numbered_otherwise_than_its_meshes_is_refused(second: list[dict[str, Found]]) -> None:
    """B14: every worker would declare another worker's shards."""
    for rank, found in enumerate(second[:4]):
        expected = f"refit rank {rank + 1} was given to the policy worker of torch.distributed rank {rank};"
        assert expected in found["drifted"]["misnumbered"]


def test_factors_that_changed_since_the_declaration_are_refused(second: list[dict[str, Found]]) -> None:
    assert [rank["drifted"]["rows"] for rank in second[:4]] == [1, 1, 1, 0]
    for rank in second[:4]:
        assert "q_proj.lora_A.weight: rank" in rank["drifted"]["message"]
        assert "declare again" in rank["drifted"]["message"]
