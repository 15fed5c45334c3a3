"""The tiny Qwen that tests build for real: the fields of its configuration that all of them share."""

from __future__ import annotations

from typing import Any

VOCABULARY = 500
"""Not a multiple of 64 times any tensor-parallel size, so that engines pad it."""


def tiny(**changed: Any) -> dict[str, Any]:
    """The fields, with those of `changed` instead. Weights are drawn large: other weights give other tokens."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        **changed,
    }
