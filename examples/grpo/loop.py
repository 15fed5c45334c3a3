"""The GRPO loop: refit, sample groups of answers, grade them, take clipped policy steps; one run folder per backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import ray
import torch

from grpo.actors import Cast, generate
from grpo.batch import Sample
from grpo.loss import group_advantages
from grpo.run_folder import RunFolder, without_refit
from grpo.task import questions, reward
from nemo_rl_reshard.config import Backend
from nemo_rl_reshard.orchestration.controller import RefitController

REFIT_TIMING = "timing/train/prepare_for_generation/transfer_and_update_weights"

Metrics = dict[str, Any]


def train(
    cast: Cast,
    controller: RefitController,
    config: Mapping[str, Any],
    backend: Backend,
    folder: RunFolder,
    on_step: Callable[[Metrics], None],
) -> list[Metrics]:
    """Run all steps from the checkpoint's weights and return their metrics. `on_step` sees each as it is done."""
    ray.get([trainer.restart.remote() for trainer in cast.trainers], timeout=config["cluster"]["step_timeout_s"])
    history = []
    for step in range(config["grpo"]["num_steps"]):
        metrics = _step(step, cast, controller, backend, config)
        folder.step(metrics)
        on_step(metrics)
        history.append(metrics)
    return history


def _step(step: int, cast: Cast, controller: RefitController, backend: Backend, config: Mapping[str, Any]) -> Metrics:
    start_s = time.perf_counter()
    metrics: Metrics = {"step": step}
    refit = _refit(step, controller, backend, config)
    metrics[REFIT_TIMING] = time.perf_counter() - start_s
    metrics |= refit

    generation_s = time.perf_counter()
    grpo, length = config["grpo"], config["task"]["answer_length"]
    asked = questions(grpo["questions_per_step"], config["seed"], step)
    answers = generate(cast, [question.tokens for question in asked], grpo["answers_per_question"], config)
    rewards = torch.tensor(
        [
            [reward(question, answer["token_ids"], length) for answer in group]
            for question, group in zip(asked, answers, strict=True)
        ]
    )
    advantages = group_advantages(rewards)
    samples = [
        Sample(list(question.tokens), answer["token_ids"], answer["logprobs"], float(advantage)).to_plain()
        for question, group, row in zip(asked, answers, advantages, strict=True)
        for answer, advantage in zip(group, row, strict=True)
    ]
    metrics["timing/train/generation"] = time.perf_counter() - generation_s

    training_s = time.perf_counter()
    shared = ray.put(samples)
    seed = config["seed"] * 100_003 + step
    trained = ray.get(
        [trainer.train_step.remote(shared, seed) for trainer in cast.trainers],
        timeout=config["cluster"]["step_timeout_s"],
    )
    metrics["timing/train/policy_training"] = time.perf_counter() - training_s
    return metrics | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "generation/length_mean": fmean(len(sample["answer"]) for sample in samples),
        **trained[0],
        "time_s": time.perf_counter() - start_s,
    }


def _refit(step: int, controller: RefitController, backend: Backend, config: Mapping[str, Any]) -> Metrics:
    """Refit to version `step`, or leave it out at a stale step: then the measured keys are null."""
    if step in config["grpo"]["stale_steps"]:
        return without_refit(step, config["grpo"]["stale_steps"], str(backend))
    return {**controller.refit(step, backend=backend).metrics(), "refit/skipped": False}
