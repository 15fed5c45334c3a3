"""Small models of the kind that NeMo RL's second worker trains: stacked experts, a live adapter, LoRA layers."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

Named = list[tuple[str, torch.Tensor]]
HIDDEN, INTER, NUM_EXPERTS = 12, 5, 4
"""Sizes of the model; experts lie in 2 or 4 parts, their hidden dim in 2 or 3."""


class SplitAdapter:
    """Stacked experts, `[E, hidden, 2 * inter]` and `[E, inter, hidden]`, to one transposed tensor per projection.

    Handed a DTensor it would give the local experts only, so it refuses one. `asked` are the names it was given.
    """

    def __init__(self, inter: int = INTER) -> None:
        self.inter = inter
        self.asked: list[str] = []

    def convert_single_tensor_to_hf(
        self, fqn: str, tensor: torch.Tensor, *, exclude_key_regex: str | None = None, quantization: bool = False
    ) -> Named:
        assert not isinstance(tensor, DTensor), "an adapter gives a DTensor's local experts only"
        assert not quantization
        self.asked.append(fqn)
        return [pair for pair in self.made(fqn, tensor) if not re.match(exclude_key_regex or "$^", pair[0])]

    def made(self, fqn: str, tensor: torch.Tensor) -> Named:
        path, _, leaf = fqn.rpartition(".")
        if leaf == "gate_and_up_projs":
            halves = {"gate_proj": tensor[:, :, : self.inter], "up_proj": tensor[:, :, self.inter :]}
        elif leaf == "down_projs":
            halves = {"down_proj": tensor}
        else:
            return [(fqn, tensor)]
        return [
            (f"{path}.{expert}.{projection}.weight", half[expert].transpose(0, 1).contiguous())
            for expert in range(tensor.shape[0])
            for projection, half in halves.items()
        ]


class ComputingAdapter(SplitAdapter):
    """Also stores norms around zero, and makes a scale of ones beside the down projections, as some families do."""

    def made(self, fqn: str, tensor: torch.Tensor) -> Named:
        if fqn.endswith("norm.weight"):
            return [(fqn, tensor + 1)]
        extra: Named = []
        if fqn.endswith(".down_projs"):
            extra.append((fqn.replace("experts.down_projs", "router.scale"), torch.ones(tensor.shape[0])))
        return super().made(fqn, tensor) + extra


class LinearLoRA(nn.Linear):
    """A linear layer that keeps its weight's name and adds `lora_A`, `lora_B` and a scale; B starts off zero."""

    def __init__(self, in_features: int, out_features: int, rank: int = 3, scale: float | None = 0.75) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.lora_A = nn.Linear(in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, out_features, bias=False)
        if scale is not None:
            self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x)) * self.scale


class Experts(nn.Module):
    """Stacked experts; the parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_and_up_projs = nn.Parameter(torch.empty(NUM_EXPERTS, HIDDEN, 2 * INTER))
        self.down_projs = nn.Parameter(torch.empty(NUM_EXPERTS, INTER, HIDDEN))


class Layer(nn.Module):
    def __init__(self, *, lora: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        linear: Any = LinearLoRA if lora else nn.Linear
        self.q_proj = linear(HIDDEN, 2 * HIDDEN) if lora else nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.mlp = nn.Module()
        self.mlp.gate = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.mlp.gate.register_buffer("e_score_correction_bias", torch.zeros(NUM_EXPERTS))
        self.mlp.experts = Experts()


class Model(nn.Module):
    """Two layers with every element of its own value; `step` is what a training step does to them."""

    def __init__(self, adapter: SplitAdapter | None = None, *, lora: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Layer(lora=lora) for _ in range(2))
        self.config = SimpleNamespace(architectures=["ExpertsForCausalLM"])
        self.state_dict_adapter = adapter
        with torch.no_grad():
            for index, tensor in enumerate((*self.parameters(), *self.buffers())):
                tensor.copy_(torch.linspace(index, index + 0.9, tensor.numel()).view(tensor.shape) / 7)

    @torch.no_grad()
    def step(self) -> None:
        """Change every trained value in place, and a buffer by putting another in its place."""
        for tensor in self.parameters():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.mul_(1.25).sub_(0.03125)
        for layer in self.model.layers:
            layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias + 0.5


def shard_experts_apart(model: Model, dense: DeviceMesh, moe: DeviceMesh) -> Model:
    """Experts over axis `ep` of `moe` and, where it is longer than 1, their hidden dim over `ep_shard`; rest: FSDP2.

    `dense` has one axis, or two for HSDP. Down projections are cut along inter by neither (5 is prime), so along dim 2.
    """
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name, parameter in list(experts.named_parameters()):
            placed = distribute_tensor(parameter.detach(), moe["ep"], [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(placed))
        if moe["ep_shard"].size() > 1:
            hidden = {experts.gate_and_up_projs: 1, experts.down_projs: 2}
            fully_shard(experts, mesh=moe["ep_shard"], shard_placement_fn=lambda tensor, at=hidden: Shard(at[tensor]))
        fully_shard(layer, mesh=dense, ignored_params=set(experts.parameters()))
    fully_shard(
        model, mesh=dense, ignored_params={p for layer in model.model.layers for p in layer.mlp.experts.parameters()}
    )
    return model


def merged_by_hand(base: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float) -> torch.Tensor:
    """What NeMo RL sends of a LoRA layer, on gathered tensors."""
    down, up = down.to(base.dtype), up.to(base.dtype)
    return base + torch.matmul(up, down) * scale
