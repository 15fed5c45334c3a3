"""The model: a real Qwen3 of about 30 million parameters over bytes, written as a checkpoint that vLLM loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from grpo.tokenizer import BEGIN, END, PAD, VOCABULARY


def write_checkpoint(folder: Path, section: Mapping[str, Any], seed: int) -> int:
    """Build the model of the `model:` section with random weights from `seed`, save it, return its parameter count.

    The embeddings are not tied to the head: a head that starts as the embedding prefers to repeat its input byte,
    which is a poor start for exploration.
    """
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=section["hidden_size"],
            intermediate_size=section["intermediate_size"],
            num_hidden_layers=section["num_layers"],
            num_attention_heads=section["num_heads"],
            num_key_value_heads=section["num_kv_heads"],
            head_dim=section["head_dim"],
            max_position_embeddings=section["max_length"],
            tie_word_embeddings=False,
            pad_token_id=PAD,
            bos_token_id=BEGIN,
            eos_token_id=END,
            dtype="float32",
        )
    )
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def load_checkpoint(folder: Path) -> Qwen3ForCausalLM:
    """The model in fp32, ready to be cut over ranks. Dropout is zero, so train mode changes nothing."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    return model.train()
