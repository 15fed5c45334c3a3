"""Start the Ray actors of a run, trainers and engines side by side, and give them to a RefitController as members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from ray.actor import ActorHandle
from ray.util import get_node_ip_address

from grpo.policy import PolicyTrainer
from grpo.tokenizer import END
from nemo_rl_reshard.orchestration.inference_actor import InferenceEngine
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.trainer_actor import ReshardTrainer
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.sources.dtensor import DTensorSource


class TrainerActor(ReshardTrainer):
    """One trainer rank in an actor of its own. `open_store` on rank 0, then `join` on all."""

    def open_store(self) -> tuple[str, int]:
        """Listen for the other trainers; returns host and port."""
        host = get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, rank: int, address: tuple[str, int], checkpoint: str, section: Mapping[str, Any]) -> None:
        """Become trainer `rank`: cut the checkpoint's weights with the others."""
        store = self._store if rank == 0 else dist.TCPStore(*address, is_master=False)
        self.trainer = PolicyTrainer(rank, store, Path(checkpoint), section)

    def restart(self) -> None:
        """Back to the checkpoint's weights."""
        self.trainer.restart()

    def train_step(self, samples: Sequence[Mapping[str, Any]], seed: int) -> dict[str, float]:
        """One GRPO step."""
        return self.trainer.train_step(samples, seed)

    def reshard_source(self, rank: int) -> DTensorSource:
        """The live parameters; trainers come first in the refit world, so they have the same rank there."""
        return DTensorSource.from_model(self.trainer.model, rank)


@dataclass(frozen=True)
class Cast:
    """All actors of a run."""

    trainers: list[ActorHandle]
    engines: list[ActorHandle]
    engine_sizes: list[int]

    def members(self) -> tuple[list[Member], list[Member]]:
        """Trainers and engines as the refit controller wants them."""
        trainers = [Member(f"trainer{rank}", Side.TRAINER, 1, actor) for rank, actor in enumerate(self.trainers)]
        engines = [
            Member(f"engine{index}", Side.INFERENCE, size, actor)
            for index, (actor, size) in enumerate(zip(self.engines, self.engine_sizes, strict=True))
        ]
        return trainers, engines


def start(checkpoint: Path, config: Mapping[str, Any]) -> Cast:
    """Start everyone and wait until all are ready. Raises ray.exceptions.GetTimeoutError past the start time-out."""
    timeout_s = config["cluster"]["start_timeout_s"]
    section = {**config["policy"], **config["loss"]}
    trainer_class = ray.remote(num_cpus=0)(TrainerActor)
    trainers = [trainer_class.remote() for _ in range(section["dp"] * section["tp"])]
    engine_class = ray.remote(num_cpus=0)(InferenceEngine)
    sizes = list(config["generation"]["engines"])
    engines = [
        engine_class.remote(f"engine{index}", str(checkpoint), _engine_options(config, size))
        for index, size in enumerate(sizes)
    ]
    address = ray.get(trainers[0].open_store.remote(), timeout=timeout_s)
    joined = [actor.join.remote(rank, address, str(checkpoint), section) for rank, actor in enumerate(trainers)]
    ray.get([*joined, *(engine.version.remote() for engine in engines)], timeout=timeout_s)
    return Cast(trainers, engines, sizes)


def _engine_options(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """What goes to vllm.LLM. Dummy weights: an engine serves nothing before its first refit anyway."""
    return {
        "tensor_parallel_size": size,
        "distributed_executor_backend": "uni" if size == 1 else "mp",
        "dtype": config["generation"]["dtype"],
        "max_model_len": config["model"]["max_length"],
        "load_format": "dummy",
        "seed": config["seed"],
    }


def generate(
    cast: Cast, prompts: Sequence[Sequence[int]], num_answers: int, config: Mapping[str, Any]
) -> list[list[dict[str, Any]]]:
    """Answers per prompt, in order; the prompts are dealt to the engines in turn. Each answer ends at END."""
    sampling = {
        "n": num_answers,
        "temperature": config["generation"]["temperature"],
        "max_tokens": config["task"]["answer_length"],
        "stop_token_ids": [END],
    }
    shares = [list(prompts[index :: len(cast.engines)]) for index in range(len(cast.engines))]
    asked = [engine.generate.remote(share, sampling) for engine, share in zip(cast.engines, shares, strict=True)]
    found = [answers for _, answers in ray.get(asked)]
    return [found[index % len(found)][index // len(found)] for index in range(len(prompts))]
