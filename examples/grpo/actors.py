"""Start the Ray actors of a run, trainers and engines side by side, and give them to a RefitController as members."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from grpo.policy import PolicyTrainer
from grpo.tokenizer import END
from nemo_rl_reshard.orchestration.inference_actor import InferenceEngine
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.trainer_actor import ReshardTrainer
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore


class TrainerActor(ReshardTrainer):
    """One trainer rank in an actor of its own."""

    def join(
        self, rank: int, address: tuple[str, int], token_hex: str, checkpoint: str, section: Mapping[str, Any]
    ) -> None:
        """Become trainer `rank`: meet the others at the driver's rendezvous, cut the checkpoint's weights with them."""
        store = RendezvousStore(address, bytes.fromhex(token_hex), section["timeout_s"])
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
    """All actors of a run, and the rendezvous of the trainers' own process group, which lives as long as they do."""

    trainers: list[ActorHandle]
    engines: list[ActorHandle]
    engine_sizes: list[int]
    rendezvous: RendezvousServer

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
    # Authenticated and on one address, as the refit's own rendezvous is; the engines start meanwhile.
    token = secrets.token_bytes(32)
    rendezvous = RendezvousServer(config["refit"].get("host", "127.0.0.1"), token)
    joined = [
        actor.join.remote(rank, rendezvous.address, token.hex(), str(checkpoint), section)
        for rank, actor in enumerate(trainers)
    ]
    ray.get([*joined, *(engine.version.remote() for engine in engines)], timeout=timeout_s)
    return Cast(trainers, engines, sizes, rendezvous)


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
        # The whole distribution at temperature 1: what the loss takes the log-probabilities to be of.
        "temperature": 1.0,
        "max_tokens": config["task"]["answer_length"],
        "stop_token_ids": [END],
    }
    shares = [list(prompts[index :: len(cast.engines)]) for index in range(len(cast.engines))]
    asked = [engine.generate.remote(share, sampling) for engine, share in zip(cast.engines, shares, strict=True)]
    found = [answers for _, answers in ray.get(asked, timeout=config["cluster"]["step_timeout_s"])]
    return [found[index % len(found)][index // len(found)] for index in range(len(prompts))]
