"""NeMo RL's launcher, as examples/run_grpo.py has it, for the small task: configuration, tokenizer, data, `setup`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpo_task
import ray
import torch
from nemo_rl.algorithms.grpo import MasterConfig, async_grpo_train, grpo_train, setup
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.utils import setup_response_data
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.models.generation import configure_generation_config
from stand_ins.recipe import Recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PROMPTS, ANSWERS = 6, 32
"""Per step."""
SAMPLES = PROMPTS * ANSWERS
MAX_GAP = 1e-5
"""Between the two sides' log-probability of the same token after a refit: what fp32 kernels differ by, generously."""


def recipe(folder: Path, num_steps: int, **named: Any) -> Recipe:
    """4 trainers (FSDP2 over tensor parallel, fp32) and two engines for `num_steps` steps. `named` go to Recipe."""
    others = {
        "grpo.num_prompts_per_step": PROMPTS,
        "grpo.num_generations_per_prompt": ANSWERS,
        "grpo.max_num_steps": num_steps,
        "grpo.max_num_epochs": 100,
        "grpo.val_period": 0,
        "policy.train_global_batch_size": SAMPLES // 4,
        "policy.train_micro_batch_size": SAMPLES // 8,
        "policy.logprob_batch_size": SAMPLES // 4,
        "policy.optimizer.kwargs.lr": 3e-3,
        "policy.scheduler": [
            {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 1}},
            {"milestones": []},
        ],
        "policy.generation.max_new_tokens": grpo_task.LENGTH,
        # Filled in from the tokenizer.
        "policy.generation.stop_token_ids": None,
        "policy.generation.vllm_cfg.use_tqdm": False,
        "policy.generation.vllm_cfg.enable_vllm_metrics_logger": False,
        "data.train": {
            "dataset_name": "ResponseDataset",
            "data_path": str(folder / "prompts.jsonl"),
            "split_validation_size": 0,
        },
        "data.default": {"processor": f"{grpo_task.NAME}_processor", "env_name": grpo_task.NAME, "prompt_file": None},
        "data.num_workers": 0,
        f"env.{grpo_task.NAME}": {},
        "logger.log_dir": str(folder / "logs"),
        "logger.tensorboard_enabled": True,
        "logger.monitor_gpus": False,
        "checkpointing.checkpoint_dir": str(folder / "checkpoints"),
        "checkpointing.metric_name": None,
        # Version 1 of the DTensor worker has one format.
        "checkpointing.model_save_format": None,
        **named.pop("others", {}),
    }
    return Recipe(
        **{
            "model": folder / "model",
            "num_trainers": 4,
            "trainer_tp": 2,
            "num_engines": 2,
            "refit": {"backend": "reshard", "verify": "full", "deadline_s": 60},
            **named,
            "others": others,
        }
    )


@dataclass
class Run:
    """What `setup` returned, with the loops called on it as the launcher calls them."""

    config: MasterConfig
    tokenizer: Any
    environments: tuple[Any, Any]
    parts: tuple[Any, ...] = field(repr=False)

    @classmethod
    def set_up(cls, recipe: Recipe, checkout: Path, family: str) -> Run:
        """`family` is that of grpo_task.model."""
        grpo_task.register()
        # NeMo RL starts these actors in environments that it builds from the network; here one environment serves all.
        ACTOR_ENVIRONMENT_REGISTRY.update(dict.fromkeys(ACTOR_ENVIRONMENT_REGISTRY, PY_EXECUTABLES.SYSTEM))
        grpo_task.write_model(recipe.model, family, seed=0)
        grpo_task.write_prompts(recipe.model.parent / "prompts.jsonl", PROMPTS * 8)
        config = recipe.master_config(checkout)
        tokenizer = get_tokenizer(config.policy["tokenizer"])
        config.policy["generation"] = configure_generation_config(config.policy["generation"], tokenizer)
        dataset, val_dataset, *environments = setup_response_data(tokenizer, config.data, config.env)
        parts = setup(config, tokenizer, dataset, val_dataset)
        return cls(config, tokenizer, (environments[0], environments[1]), parts)

    @property
    def policy(self) -> Any:
        return self.parts[0]

    @property
    def generation(self) -> Any:
        return self.parts[1]

    @property
    def clusters(self) -> Any:
        return self.parts[3]

    @property
    def logger(self) -> Any:
        return self.parts[7]

    @property
    def log_folder(self) -> Path:
        return Path(self.config.logger["log_dir"])

    def train(self) -> None:
        """NeMo RL's synchronous loop."""
        with _this_ray():
            grpo_train(*self._arguments())

    def train_async(self) -> None:
        """NeMo RL's asynchronous loop; at its end it shuts all workers down."""
        ages = self.config.grpo.async_grpo.max_trajectory_age_steps
        with _this_ray():
            async_grpo_train(*self._arguments(), max_trajectory_age_steps=ages)

    def _arguments(self) -> tuple[Any, ...]:
        policy, generation, _, _, dataloader, val_dataloader, loss, logger, checkpointer, state, config, *_ = self.parts
        data = (dataloader, val_dataloader, self.tokenizer, loss)
        return (policy, generation, *data, *self.environments, logger, checkpointer, state, config)

    def stop(self) -> None:
        """Whatever state they are in."""
        self.generation.shutdown()
        self.policy.shutdown()
        for cluster in self.clusters:
            cluster.shutdown()


def _this_ray() -> AbstractContextManager[Any]:
    """The loops ask Ray for memory statistics, and Ray then looks for a single cluster on this machine unless told."""
    return patch.dict(os.environ, RAY_ADDRESS=ray.get_runtime_context().gcs_address)


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value of every scalar that NeMo RL's tensorboard logger wrote below `folder`."""
    found: dict[str, dict[int, float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    return found


@dataclass(frozen=True)
class Batch:
    """What a step trained on, of the shape [samples, tokens], as NeMo RL logs it."""

    tokens: torch.Tensor
    is_answer: torch.Tensor
    by_engine: torch.Tensor
    by_trainer: torch.Tensor

    def rows(self, chosen: torch.Tensor) -> Batch:
        """The samples for which `chosen` [samples] is true."""
        return Batch(*(each[chosen] for each in (self.tokens, self.is_answer, self.by_engine, self.by_trainer)))

    def gap(self, others: torch.Tensor | None = None) -> torch.Tensor:
        """Per sample, the mean absolute difference of the answer tokens' log-probabilities."""
        apart = ((self.by_trainer if others is None else others) - self.by_engine).abs() * self.is_answer
        return apart.sum(1) / self.is_answer.sum(1)


def batches(folder: Path) -> Iterator[Batch]:
    """Those of each step, in order."""
    step = 1
    while (file := next(folder.rglob(f"train_data_step{step}.jsonl"), None)) is not None:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        names = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
        # Every row is a batch of one.
        yield Batch(*(torch.tensor([row[name][0] for row in rows]) for name in names))
        step += 1
