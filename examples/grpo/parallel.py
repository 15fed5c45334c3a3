"""Cut a Qwen3 over a dp x tp mesh: tensor parallel inside each layer, FSDP2 over that. Masters stay fp32."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import Qwen3ForCausalLM


def parallelize(model: Qwen3ForCausalLM, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Cut `model` in place over the axes `dp` and `tp` of `mesh`. Every rank must hold equal weights.

    Embedding and head are cut over the vocabulary, projections by columns or rows; norms of the residual stream stay
    whole on the dp axis alone, so parameters of one model live on different meshes, as they do in real trainers.
    """
    tp = mesh["tp"]
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        plan: dict[str, ParallelStyle] = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            # These norms see only the heads of their rank: as DTensors their gradients are summed over tp.
            "self_attn.q_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "self_attn.k_norm": SequenceParallel(sequence_dim=2, use_local_output=True),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(layer, tp, plan)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def gradient_norm(parameters: list[torch.nn.Parameter], mesh: DeviceMesh) -> torch.Tensor:
    """Euclidean norm of the whole gradient, each element counted once however many ranks hold it. A collective."""
    total = torch.zeros((), dtype=torch.float32)
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient, copies = parameter.grad, mesh.size()
        if isinstance(gradient, DTensor):
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                # A strided shard is no subclass of Shard; whatever is not a replica divides the elements.
                copies //= size if not isinstance(placement, Replicate) else 1
            gradient = gradient.to_local()
        total += gradient.float().square().sum() / copies
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(total, group=mesh.get_group(axis))
    return total.sqrt()
