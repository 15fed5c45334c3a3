"""Real vLLM engines as Ray actors whose parameters can be read back."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import ray
import torch

from nemo_rl_reshard.orchestration.inference_actor import InferenceEngine
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.params.manifest import Side

OPTIONS = {"max_model_len": 128, "dtype": "float32", "block_size": 32}
GREEDY = {"max_tokens": 12, "temperature": 0.0}
START_S = 200.0
"""An actor's first answer waits until its engine has started, which a busy machine draws out."""
PROMPTS = [[1, 2, 3, 4], [9, 8, 7], list(range(40, 140, 2))]
"""The last one fills whole blocks, so that a prefix cache that outlives its weights shows."""


def digests(worker: Any) -> dict[str, str]:
    """Name -> digest of every parameter and buffer of an engine worker's model, bit for bit."""
    model = worker.model_runner.get_model()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in named.items()
    }


def load_afresh(worker: Any, folder: str) -> None:
    """Have the engine's own loader cut the whole tensors of `folder`, over parameters that hold nothing any more."""
    from safetensors.torch import load_file

    model = worker.model_runner.get_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.load_weights(iter(load_file(Path(folder) / "model.safetensors").items()))


class ReadableEngine(InferenceEngine):
    """An engine that shows what it holds; `may_generate` lets a fresh engine serve its checkpoint, as a reference."""

    def digests(self) -> list[dict[str, str]]:
        """Per worker, in rank order."""
        return self._llm.collective_rpc(digests)

    def gathered_and_sliced(self, folder: str) -> list[dict[str, str]]:
        """What `digests` would be had the engine loaded `folder`: its parameters are replaced."""
        self._llm.collective_rpc(load_afresh, args=(folder,))
        return self.digests()

    def serve_checkpoint(self) -> None:
        self.gate.finish_refit(-1)
        self.gate.publish(-1)

    def tokens(self) -> list[list[int]]:
        _, answers = self.generate(PROMPTS, GREEDY)
        return [samples[0]["token_ids"] for samples in answers]


class EngineMember:
    """An engine actor on a checkpoint, as a member of refits."""

    def __init__(self, name: str, checkpoint: Path, tp: int) -> None:
        options = {**OPTIONS, "tensor_parallel_size": tp, "distributed_executor_backend": "mp" if tp > 1 else "uni"}
        self.actor = ray.remote(num_cpus=0)(ReadableEngine).remote(name, str(checkpoint), options)
        self.member = Member(name, Side.INFERENCE, tp, self.actor)

    def tokens(self) -> list[list[int]]:
        return ray.get(self.actor.tokens.remote(), timeout=START_S)

    def digests(self) -> list[dict[str, str]]:
        return ray.get(self.actor.digests.remote(), timeout=START_S)

    def gathered_and_sliced(self, folder: Path) -> list[dict[str, str]]:
        return ray.get(self.actor.gathered_and_sliced.remote(str(folder)), timeout=60)

    def version(self) -> int | None:
        return ray.get(self.actor.version.remote(), timeout=60)

    def stop(self) -> None:
        ray.kill(self.actor)
