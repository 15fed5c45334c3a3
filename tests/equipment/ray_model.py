"""The tiny Qwen3 that Ray tests train and serve: real architecture, a vocabulary that engines have to pad."""

from __future__ import annotations

from pathlib import Path

import torch

from equipment.tiny_qwen import tiny


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Save a random model that vLLM can load. Weights are large, so that other weights give other tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**tiny(intermediate_size=192, dtype="float32")))
    model.save_pretrained(folder)
    return folder
