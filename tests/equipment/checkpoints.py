"""Tiny checkpoint folders with real architectures: random weights by seed, written once per test session."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from equipment.tiny_qwen import VOCABULARY, tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "moe": {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "moe_pair": {"moe_intermediate_size": 32, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True},
    "moe_padded": {"moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True},
    "moe_narrow": {
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
    },
    # Qwen2-MoE: biases on q, k and v, and a shared expert with a gate of its own.
    "shared": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_attention_heads": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}
"""Qwen3 and Qwen2 variants by name: what differs from the common tiny configuration."""


def make_checkpoint(folder: Path, family: str, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """Write `folder/family_seed_dtype` unless it is there, and return it."""
    target = folder / f"{family}_{seed}_{str(dtype).removeprefix('torch.')}"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    weights = _weights(family, seed, dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_config(family, dtype)))
    return target


def write_checkpoint(target: Path, like: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """A checkpoint of `weights` with the configuration of checkpoint `like`."""
    target.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / "model.safetensors")
    (target / "config.json").write_text((like / "config.json").read_text())
    return target


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by its checkpoint name."""
    return dict(load_file(checkpoint / "model.safetensors"))


def _config(family: str, dtype: torch.dtype) -> dict[str, Any]:
    is_moe = family.startswith("moe")
    return {
        "architectures": ["Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if is_moe else "qwen3",
        **tiny(**FAMILIES[family]),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _shapes(family: str) -> dict[str, tuple[int, ...]]:
    config = tiny(**FAMILIES[family])
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        if family == "shared":
            shapes |= {
                f"{layer}.self_attn.{part}_proj.bias": (n,)
                for part, n in zip("qkv", (queries, keys, keys), strict=True)
            }
            shapes |= _mlp(f"{layer}.mlp.shared_expert", config["shared_expert_intermediate_size"], hidden)
            shapes[f"{layer}.mlp.shared_expert_gate.weight"] = (1, hidden)
        else:
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
        if "num_experts" not in config:
            shapes |= _mlp(f"{layer}.mlp", config["intermediate_size"], hidden)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            shapes |= _mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"], hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, hidden)
    return shapes


def _mlp(prefix: str, intermediate: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def _weights(family: str, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(family).items():
        values = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.1 * values if len(shape) == 1 else 0.3 * values).to(dtype)
    return weights
