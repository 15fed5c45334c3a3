"""vLLM plugin for CPU-only machines: correct expert parallelism, and, if asked, weights that stay as they were loaded.

Put this folder on PYTHONPATH; vLLM finds the plugin by its entry point and runs `register` in every process of an
engine before the model is built. It is equipment of the tests and examples, not part of the package.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

LIVE_VARIABLE = "CPU_ENGINE_LIVE_WEIGHTS"
"""Set to 1, layers compute with plain torch on the loaded weights, so that these can be written in place."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; may run more than once in a process."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    live = os.environ.get(LIVE_VARIABLE, "0") == "1"
    if live:
        _keep_linear_weights()
    _patch_experts(live)


def _keep_linear_weights() -> None:
    """Without the packing kernels vLLM falls back to torch's own linear on `layer.weight`."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = _never


def _never(*_: Any) -> bool:
    return False


def _patch_experts(live: bool) -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts: Any = getattr(cpu_moe, "CPUUnquantizedExperts", None)
    # 0.25 has no such class: its experts run as they are, on packed weights.
    if experts is None or getattr(experts, "patched_by_cpu_engine", False):
        return
    experts.patched_by_cpu_engine = True
    if live:
        experts.process_weights_after_loading = _leave_weights
        experts.apply = _apply_with_torch
        return
    packed_apply = experts.apply

    def apply_with_map(self: Any, *, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **named: Any) -> None:
        weights, ids = _local_choice(topk_weights, topk_ids, named["expert_map"])
        packed_apply(self, topk_weights=weights.contiguous(), topk_ids=ids.contiguous(), **named)

    experts.apply = apply_with_map


def _local_choice(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Global expert ids as local ones; another rank's expert gets weight 0.

    vLLM 0.32's CPU kernel ignores `expert_map` and reads past the local experts.
    """
    if expert_map is None:
        return topk_weights, topk_ids
    local = expert_map.to(topk_ids.device)[topk_ids.long()]
    return topk_weights * (local >= 0), local.clamp(min=0).to(topk_ids.dtype)


def _leave_weights(self: Any, _layer: torch.nn.Module) -> None:
    self._use_zentorch = False


def _apply_with_torch(
    _self: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    **_unused: Any,
) -> None:
    """One expert at a time: slow, and reads w1 [experts, 2 * intermediate, hidden] and w2 as they were loaded."""
    if activation.value != "silu":
        raise NotImplementedError(f"activation {activation.value}; only silu is written here")
    weights, ids = _local_choice(topk_weights, topk_ids, expert_map)
    if apply_router_weight_on_input:
        weights = (weights != 0).to(weights.dtype)
    output.zero_()
    for expert in range(w1.shape[0]):
        token, slot = torch.where(ids == expert)
        if not len(token):
            continue
        gate, up = F.linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        partial = F.linear(F.silu(gate) * up, w2[expert])
        output.index_add_(0, token, (partial * weights[token, slot, None]).to(output.dtype))
