"""Small random Qwen3 checkpoints whose heads and experts every parallel size of this tier divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

_COMMON: dict[str, Any] = {
    # Not a multiple of 64 times any parallel size, so that engines pad it.
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "dtype": "float32",
}


def write_model(folder: Path, *, tied: bool = False) -> Path:
    """Save a dense checkpoint; `tied`: the head is the embedding."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**_COMMON, tie_word_embeddings=tied)).save_pretrained(folder)
    return folder


def write_expert_model(folder: Path) -> Path:
    """Save a checkpoint with four experts a layer, which transformers keeps stacked in one tensor."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**_COMMON, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Version 2 of the policy worker loads one; nothing is written with it."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
