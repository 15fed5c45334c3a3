"""Tiny models as Hugging Face configuration files, and refit specs by model that name them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 96,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def model_spec(folder: Path, config: dict[str, Any] = DENSE, **changed: Any) -> dict[str, Any]:
    """A spec of 4 trainers and 4 inference ranks with the model's configuration in `folder`; None leaves a key out."""
    (folder / "config.json").write_text(json.dumps(config))
    plain = {
        "model": {"hf_config": "config.json"},
        "source": {"backend": "fsdp2", "world": 4, "dp_shard": 2, "tp": 2},
        "target": {"backend": "vllm", "world": 4, "tp": 2, "dp": 2},
        "topology": {"preset": "dgx-h100"},
        **changed,
    }
    return {key: value for key, value in plain.items() if value is not None}


def write_spec(folder: Path, plain: dict[str, Any], name: str = "spec.yaml") -> Path:
    """The spec as a file in `folder`."""
    path = folder / name
    path.write_text(yaml.safe_dump(plain))
    return path
