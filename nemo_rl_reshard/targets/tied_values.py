"""Two checkpoint tensors for one tied parameter: only one is written, and the other must say the same."""

from __future__ import annotations

import torch

from nemo_rl_reshard.targets.vllm_layers import VllmLayers
from nemo_rl_reshard.targets.vllm_trace import ModelTrace


class TiedValues:
    """Keeps, during a refit, this rank's part of each tensor that shares a parameter with another one."""

    def __init__(self, layers: VllmLayers, trace: ModelTrace) -> None:
        self._layers = layers
        self._shards = {
            name: [
                shard for shards in trace.loader.places.values() for shard in shards if shard.view.storage == storage
            ]
            for name, storage in trace.loader.tied.items()
        }
        self._parts: dict[str, list[torch.Tensor]] = {}

    def begin(self) -> None:
        """Forget the last refit."""
        self._parts.clear()

    def note(self, name: str, tensor: torch.Tensor) -> None:
        """Copy what this rank would have loaded of `tensor` (the whole one)."""
        self._parts[name] = [tensor[shard.region.slices].clone() for shard in self._shards[name]]

    def differences(self) -> list[str]:
        """One sentence for every tied tensor whose values differ from what its parameter now holds."""
        found = []
        for name, parts in self._parts.items():
            for shard, part in zip(self._shards[name], parts, strict=True):
                base = self._layers.tensor(shard.view.storage).detach()
                held = base.as_strided(
                    shard.view.extent, shard.view.stride, int(base.storage_offset()) + shard.view.offset
                )
                if not torch.equal(held, part.to(held)):
                    found.append(
                        f"{name} differs from {shard.tensor}, and the engine keeps one parameter for both "
                        f"({shard.view.storage}); start the engine with tie_word_embeddings false"
                    )
                    break
        self._parts.clear()
        return found
