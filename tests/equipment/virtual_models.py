"""Small models as names and shapes, written out by hand: what `virtual` lays out, without transformers."""

from __future__ import annotations

from typing import Any

from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.virtual.model import ModelShape

Shapes = dict[str, tuple[int, ...]]


def model(shapes: Shapes, architecture: str = "Qwen3ForCausalLM", **config: Any) -> ModelShape:
    """A model of exactly these tensors in bfloat16."""
    specs = tuple(TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items())
    return ModelShape("tiny", architecture, specs, config)


def attention(layer: int, heads: int, groups: int, head: int, hidden: int, *, gated: bool = False) -> Shapes:
    """Grouped-query attention; `gated`: each query head has as many gate rows behind its own."""
    path = f"model.layers.{layer}.self_attn"
    return {
        f"{path}.q_proj.weight": (heads * head * (1 + gated), hidden),
        f"{path}.k_proj.weight": (groups * head, hidden),
        f"{path}.v_proj.weight": (groups * head, hidden),
        f"{path}.o_proj.weight": (hidden, heads * head),
        f"{path}.q_norm.weight": (head,),
    }


def feed_forward(path: str, inner: int, hidden: int) -> Shapes:
    """Gate, up and down projection."""
    return {
        f"{path}.gate_proj.weight": (inner, hidden),
        f"{path}.up_proj.weight": (inner, hidden),
        f"{path}.down_proj.weight": (hidden, inner),
    }


def dense(*, layers: int = 2, vocabulary: int = 50, hidden: int = 8, inner: int = 12, tied: bool = False) -> ModelShape:
    """A Qwen3 with 6 query and 2 key/value heads of 4."""
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= attention(layer, 6, 2, 4, hidden) | feed_forward(f"model.layers.{layer}.mlp", inner, hidden)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, hidden)
    return model(shapes, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=tied)


def experts(*, layers: int = 2, num_experts: int = 6, hidden: int = 8, inner: int = 4) -> ModelShape:
    """A Qwen3-MoE: a dense first layer, then a router and experts; 4 query and 2 key/value heads of 4."""
    shapes: Shapes = {"model.embed_tokens.weight": (64, hidden)}
    for layer in range(layers):
        shapes |= attention(layer, 4, 2, 4, hidden)
        path = f"model.layers.{layer}.mlp"
        if layer == 0:
            shapes |= feed_forward(path, 12, hidden)
            continue
        shapes[f"{path}.gate.weight"] = (num_experts, hidden)
        for expert in range(num_experts):
            shapes |= feed_forward(f"{path}.experts.{expert}", inner, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (64, hidden)}
    return model(shapes, "Qwen3MoeForCausalLM", num_attention_heads=4, num_key_value_heads=2)


def latent(*, layers: int = 3, num_experts: int = 4) -> ModelShape:
    """A DeepSeek-V3: latent attention of 4 heads, one dense layer, a shared expert, a router with a score bias."""
    hidden, shapes = 16, {"model.embed_tokens.weight": (64, 16)}
    for layer in range(layers):
        path = f"model.layers.{layer}.self_attn"
        shapes |= {
            f"{path}.q_a_proj.weight": (6, hidden),
            f"{path}.q_a_layernorm.weight": (6,),
            f"{path}.q_b_proj.weight": (4 * 6, 6),
            f"{path}.kv_a_proj_with_mqa.weight": (5, hidden),
            f"{path}.kv_a_layernorm.weight": (3,),
            f"{path}.kv_b_proj.weight": (4 * 8, 3),
            f"{path}.o_proj.weight": (hidden, 4 * 4),
        }
        path = f"model.layers.{layer}.mlp"
        if layer == 0:
            shapes |= feed_forward(path, 24, hidden)
            continue
        shapes |= {f"{path}.gate.weight": (num_experts, hidden), f"{path}.gate.e_score_correction_bias": (num_experts,)}
        for expert in range(num_experts):
            shapes |= feed_forward(f"{path}.experts.{expert}", 8, hidden)
        shapes |= feed_forward(f"{path}.shared_experts", 8, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (64, hidden)}
    return model(shapes, "DeepseekV3ForCausalLM", num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=3)


def delta() -> ModelShape:
    """A Qwen3.5: a gated delta net of 2 key and 4 value heads, then gated attention; experts and a shared one."""
    hidden, path = 8, "model.layers.0.linear_attn"
    shapes: Shapes = {
        "model.embed_tokens.weight": (70, hidden),
        f"{path}.dt_bias": (4,),
        f"{path}.A_log": (4,),
        f"{path}.conv1d.weight": (2 * 2 * 3 + 4 * 5, 1, 4),
        f"{path}.norm.weight": (5,),
        f"{path}.out_proj.weight": (hidden, 4 * 5),
        f"{path}.in_proj_qkv.weight": (2 * 2 * 3 + 4 * 5, hidden),
        f"{path}.in_proj_z.weight": (4 * 5, hidden),
        f"{path}.in_proj_b.weight": (4, hidden),
        f"{path}.in_proj_a.weight": (4, hidden),
    }
    shapes |= attention(1, 4, 2, 4, hidden, gated=True)
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        shapes[f"{mlp}.gate.weight"] = (4, hidden)
        for expert in range(4):
            shapes |= feed_forward(f"{mlp}.experts.{expert}", 4, hidden)
        shapes |= feed_forward(f"{mlp}.shared_expert", 4, hidden)
        shapes[f"{mlp}.shared_expert_gate.weight"] = (1, hidden)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (70, hidden)}
    return model(
        shapes,
        "Qwen3_5MoeForCausalLM",
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )


def state_space() -> ModelShape:
    """A Nemotron-H: a state-space mixer of 4 heads in 2 groups, experts in a latent space, attention."""
    hidden, path = 8, "backbone.layers"
    shapes: Shapes = {
        "backbone.embeddings.weight": (64, hidden),
        f"{path}.0.norm.weight": (hidden,),
        f"{path}.0.mixer.in_proj.weight": (2 * 4 * 3 + 2 * 2 * 5 + 4, hidden),
        f"{path}.0.mixer.conv1d.weight": (4 * 3 + 2 * 2 * 5, 1, 4),
        f"{path}.0.mixer.conv1d.bias": (4 * 3 + 2 * 2 * 5,),
        f"{path}.0.mixer.A_log": (4,),
        f"{path}.0.mixer.D": (4,),
        f"{path}.0.mixer.dt_bias": (4,),
        f"{path}.0.mixer.norm.weight": (4 * 3,),
        f"{path}.0.mixer.out_proj.weight": (hidden, 4 * 3),
        f"{path}.1.mixer.gate.weight": (4, hidden),
        f"{path}.1.mixer.gate.e_score_correction_bias": (4,),
        f"{path}.1.mixer.fc1_latent_proj.weight": (6, hidden),
        f"{path}.1.mixer.fc2_latent_proj.weight": (hidden, 6),
    }
    for expert in range(4):
        shapes[f"{path}.1.mixer.experts.{expert}.up_proj.weight"] = (10, 6)
        shapes[f"{path}.1.mixer.experts.{expert}.down_proj.weight"] = (6, 10)
    shapes |= {
        f"{path}.2.mixer.q_proj.weight": (16, hidden),
        f"{path}.2.mixer.k_proj.weight": (8, hidden),
        f"{path}.2.mixer.v_proj.weight": (8, hidden),
        f"{path}.2.mixer.o_proj.weight": (hidden, 16),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (64, hidden),
    }
    return model(
        shapes,
        "NemotronHForCausalLM",
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_num_heads=4,
        mamba_head_dim=3,
        n_groups=2,
        ssm_state_size=5,
    )
