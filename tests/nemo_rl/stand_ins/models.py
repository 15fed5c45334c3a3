"""Small random Qwen3 checkpoints whose heads and experts every parallel size of this tier divides."""

from __future__ import annotations

from pathlib import Path

import torch
from equipment.tiny_qwen import tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


def write_model(folder: Path, *, tied: bool = False) -> Path:
    """Save a dense checkpoint; `tied`: the head is the embedding."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**tiny(tie_word_embeddings=tied, dtype="float32"))).save_pretrained(folder)
    return folder


def write_expert_model(folder: Path) -> Path:
    """Save a checkpoint with four experts a layer, which transformers keeps stacked in one tensor."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**tiny(moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, dtype="float32"))
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Version 2 of the policy worker loads one; nothing is written with it."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
