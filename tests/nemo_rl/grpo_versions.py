"""NeMo RL's asynchronous loop on the small task, and the trainers' weights at every refit of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpo_run
import grpo_task
import ray
import torch
from grpo_run import Run
from stand_ins import in_actors
from transformers import PreTrainedModel

from nemo_rl_reshard.integrations.nemo_rl.attach import attach
from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer

FAMILY = "qwen3"
FAULTY = "model.layers.1.mlp.down_proj.weight"
Weights = dict[str, torch.Tensor]


class RemembersWeights:
    """NeMo RL's `WeightSynchronizer`: another one, and the trainers' weights at every refit; one refit it can spoil."""

    def __init__(self, synchronizer: ReshardWeightSynchronizer, run: Run, spoilt: int | None = None) -> None:
        self._synchronizer = synchronizer
        self._trainers = run.policy.worker_group.workers
        self._spoilt = spoilt
        self.versions: list[Weights] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """The loop sends the engines' handle, and this with it, to the actor that collects answers."""
        return _itself, (self._synchronizer,)

    @property
    def is_stale(self) -> bool:
        return self._synchronizer.is_stale

    def sync_weights(self, **named: Any) -> dict[str, float]:
        if len(self.versions) == self._spoilt:
            spoil(self._trainers[-1])
        scalars = self._synchronizer.sync_weights(**named)
        whole = [each.__ray_call__.remote(in_actors.full_tensors) for each in self._trainers]
        self.versions.append(in_actors.from_plain(ray.get(whole, timeout=60)[0]))
        return scalars

    def shutdown(self) -> None:
        self._synchronizer.shutdown()


def _itself(synchronizer: ReshardWeightSynchronizer) -> ReshardWeightSynchronizer:
    return synchronizer


def spoil(trainer: Any) -> None:
    """Its next refit fails, after others have begun to write."""
    ray.get(trainer.__ray_call__.remote(in_actors.plan_fault, "raise", FAULTY), timeout=60)


@contextmanager
def running(
    folder: Path, checkout: Path, num_steps: int, others: dict[str, Any] | None = None
) -> Iterator[tuple[Run, ReshardWeightSynchronizer]]:
    """After `setup` and `attach`: two trainers, FSDP2, and an asynchronous engine. `others` as in Recipe."""
    chosen = {"grpo.async_grpo.enabled": True, "loss_fn.use_importance_sampling_correction": True, **(others or {})}
    recipe = grpo_run.recipe(
        folder, num_steps, num_trainers=2, trainer_tp=1, num_engines=1, is_async=True, others=chosen
    )
    started = Run.set_up(recipe, checkout, FAMILY)
    try:
        attached = attach(started.policy, started.generation, started.clusters, started.config, logger=started.logger)
        assert attached is not None
        yield started, attached
    finally:
        started.stop()


def plain_model(weights: Weights) -> PreTrainedModel:
    """The model of the task, outside NeMo RL and vLLM, with these weights."""
    model = grpo_task.model(FAMILY)
    model.load_state_dict(weights)
    return model.eval()


def log_probabilities(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """Of every token given those before it, by the plain model; 0 for the first. All of the shape [samples, tokens]."""
    with torch.no_grad():
        return chosen(plain_model(weights)(tokens[:, :-1]).logits, tokens)


def chosen(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of `tokens`, 0 for the first, where `logits` are what followed each but the last."""
    found = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(found, (1, 0))
