"""Tiny models of the families that presets cover, and the engine layouts in which vLLM's loaders are traced."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_rl_reshard.cli.hf_model import read_model
from nemo_rl_reshard.virtual.model import ModelShape

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 130,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 10,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_QWEN35 = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_QWEN3_NEXT = _QWEN35 | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}
_NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "intermediate_size": 96,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_latent_size": 32,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
    "mlp_hidden_act": "relu2",
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _QWEN3,
    "qwen3 tied": _QWEN3 | {"tie_word_embeddings": True},
    "qwen3 moe": _QWEN3_MOE,
    "qwen2 tied": _QWEN2,
    "deepseek": _DEEPSEEK,
    "deepseek without q_lora": _DEEPSEEK | {"q_lora_rank": None, "num_hidden_layers": 2},
    "qwen3.5 moe": _QWEN35,
    "qwen3 next": _QWEN3_NEXT,
    "nemotron": _NEMOTRON,
    "mixtral": _MIXTRAL,
}


@dataclass(frozen=True, slots=True)
class TraceCase:
    """One family in one engine layout; sizes as `vllm_target` takes them."""

    family: str
    tp: int
    dp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def name(self) -> str:
        """A name for tests, and for the folder of the configuration."""
        return f"{self.family} tp{self.tp} dp{self.dp} ep{self.ep} pp{self.pp}"

    @property
    def world(self) -> int:
        """Ranks of all engines."""
        return self.tp * self.dp * self.pp


CASES = (
    TraceCase("qwen3", tp=1),
    TraceCase("qwen3", tp=2),
    TraceCase("qwen3", tp=8),  # four ranks share a key/value head
    TraceCase("qwen3", tp=2, pp=2),
    TraceCase("qwen3 tied", tp=2, pp=3),
    TraceCase("qwen2 tied", tp=3),  # 130 rows padded to 192: the last rank has two
    TraceCase("qwen2 tied", tp=6, pp=2),
    TraceCase("qwen3 moe", tp=2),
    TraceCase("qwen3 moe", tp=4, ep=4),  # six experts on four ranks
    TraceCase("qwen3 moe", tp=2, dp=2, ep=4),
    TraceCase("qwen3 moe", tp=2, pp=2),
    TraceCase("deepseek", tp=4),
    TraceCase("deepseek", tp=4, ep=4),
    TraceCase("deepseek", tp=2, dp=2, ep=4),
    TraceCase("deepseek", tp=1, dp=4, ep=4),
    TraceCase("deepseek", tp=2, pp=3),
    TraceCase("deepseek without q_lora", tp=2),
    TraceCase("qwen3.5 moe", tp=1),
    TraceCase("qwen3.5 moe", tp=4),
    TraceCase("qwen3.5 moe", tp=2, ep=2),
    TraceCase("qwen3.5 moe", tp=2, dp=2, ep=4),
    TraceCase("qwen3.5 moe", tp=2, pp=2),
    TraceCase("qwen3 next", tp=4),
    TraceCase("qwen3 next", tp=2, pp=2),
    TraceCase("nemotron", tp=2),
    TraceCase("nemotron", tp=4, ep=4),
    TraceCase("nemotron", tp=2, dp=2, ep=4),
    TraceCase("nemotron", tp=2, pp=2),
    TraceCase("mixtral", tp=2, pp=2),
    TraceCase("mixtral", tp=2, ep=2),
)


def model_of(folder: Path, case: TraceCase) -> ModelShape:
    """The tiny model of a case; its configuration is written into a folder of its own, for vLLM to read."""
    path = folder / case.name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_FAMILIES[case.family]))
    return read_model({"hf_config": str(path)})
