"""Real trainers for tests: tiny Qwen3 models, sharded by FSDP2 and tensor parallelism in spawned gloo processes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from equipment.layout_cases import LayoutCase
from nemo_rl_reshard import layout
from nemo_rl_reshard.layout import parse_placement

Worker = Callable[..., Any]  # worker(rank, size, *arguments) -> what torch.save can keep


def run_trainers(size: int, worker: Worker, folder: Path, *arguments: Any, timeout_s: float = 200) -> list[Any]:
    """Run `worker(rank, size, *arguments)` in `size` gloo processes; the results in rank order.

    `worker` must be importable by name. A process that raises fails the call; one that hangs does so after
    `timeout_s`, and is killed.
    """
    context = mp.start_processes(
        _start, args=(size, worker, str(folder), arguments), nprocs=size, join=False, start_method="spawn"
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=max(0.1, deadline - time.monotonic()), grace_period=5):
            if time.monotonic() >= deadline:
                alive = [rank for rank, process in enumerate(context.processes) if process.is_alive()]
                raise TimeoutError(f"trainers {alive} still run after {timeout_s} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"result_{rank}.pt", weights_only=False) for rank in range(size)]


def _start(rank: int, size: int, worker: Worker, folder: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Said by torch about its own use of its own interfaces.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        torch.save(worker(rank, size, *arguments), Path(folder) / f"result_{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def grid(shape: tuple[int, ...], axes: tuple[str, ...], ranks: tuple[int, ...] | None = None) -> DeviceMesh:
    """A CPU device mesh over the given ranks (default: the first ones). Every process of the world must call it."""
    count = torch.Size(shape).numel()
    members = torch.tensor(ranks if ranks is not None else range(count)).view(shape)
    return DeviceMesh("cpu", members, mesh_dim_names=axes)


def placed_as(case: LayoutCase, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """`whole` as a DTensor in the layout of `case`, made by torch's own splitting rules."""
    placements = [_torch_placement(text) for text in case.placements]
    if not any(isinstance(placement, _StridedShard) for placement in placements):
        return distribute_tensor(whole, mesh, placements, src_data_rank=None)
    coordinate = mesh.get_coordinate()
    local, later = whole if coordinate is not None else whole[:0], set()
    for axis in reversed(range(mesh.ndim)) if coordinate is not None else ():
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        # torch: cut by the later axes already, a strided placement is a plain cut of what is left.
        splitter = Shard(placement.dim) if placement.dim in later else placement
        later.add(placement.dim)
        local = splitter._split_tensor(local, mesh.size(axis), with_padding=False)[0][coordinate[axis]]
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _torch_placement(text: str) -> Placement:
    placement = parse_placement(text)
    if isinstance(placement, layout.StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Shard(placement.dim) if isinstance(placement, layout.Shard) else Replicate()


SIZES = {
    "vocab_size": 37,
    "hidden_size": 18,
    "intermediate_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
"""Sizes that neither 2 nor 3 divides throughout: vocabulary and experts are always cut unevenly."""
NUM_EXPERTS, EXPERT_SIZE = 5, 10


def tiny_qwen3(*, tied: bool = False) -> nn.Module:
    """A dense Qwen3 of two layers, with position-coded weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(**SIZES, tie_word_embeddings=tied, attn_implementation="eager")
    return position_coded(AutoModelForCausalLM.from_config(config))


def tiny_qwen3_moe() -> nn.Module:
    """A Qwen3-MoE of two layers, experts stacked as transformers 5 keeps them, with position-coded weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **SIZES,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=EXPERT_SIZE,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return position_coded(AutoModelForCausalLM.from_config(config))


@torch.no_grad()
def position_coded(model: nn.Module) -> nn.Module:
    """Give every element of every parameter a value of its own that still lets a forward pass stay finite."""
    for index, parameter in enumerate(model.parameters()):
        numel = parameter.numel()
        values = torch.arange(numel, dtype=torch.float64) / numel * 0.1 + index * 1e-3
        parameter.copy_(values.view(parameter.shape) - 0.05)
    return model


def shard_columns_and_rows(model: nn.Module, mesh: DeviceMesh, *, head_norms: bool = True) -> None:
    """Tensor parallelism over a one-axis mesh: attention, and the MLP where it is dense.

    Norms of query and key heads see only the local heads, so their gradients must be summed over the axis; cutting
    their input by heads (dim 2) does that. Without `head_norms` the copies drift apart from the first step on.
    """
    for layer in model.model.layers:
        plan = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan["self_attn.o_proj"] = RowwiseParallel()
        if head_norms:
            plan |= {
                f"self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True)
                for name in ("q_norm", "k_norm")
            }
        if hasattr(layer.mlp, "gate_proj"):
            plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            plan["mlp.down_proj"] = RowwiseParallel()
        parallelize_module(layer, mesh, plan)


def shard_fully(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> None:
    """FSDP2 over a one-axis mesh, HSDP over a two-axis one: each layer, then the root."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


def train_one_step(model: nn.Module) -> float:
    """One AdamW step on fixed tokens; the loss before it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    tokens = torch.arange(12).view(2, 6) * 3 % SIZES["vocab_size"]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.item()
