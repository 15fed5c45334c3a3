"""The tiny Qwen3 that Ray tests train and serve: real architecture, a vocabulary that engines have to pad."""

from __future__ import annotations

from pathlib import Path

import torch

VOCABULARY = 500


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Save a random model that vLLM can load. Weights are large, so that other weights give other tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            initializer_range=0.3,
            dtype="float32",
        )
    )
    model.save_pretrained(folder)
    return folder
