"""Small random Qwen3 checkpoints whose heads every parallel size of this tier divides."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def write_model(folder: Path, *, tied: bool, seed: int = 0) -> Path:
    """Save a checkpoint. Its vocabulary is not a multiple of 64 times any parallel size, so that engines pad it."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
