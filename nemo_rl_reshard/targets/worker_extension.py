"""From a vLLM worker to its target: the one place that knows where a worker keeps its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl_reshard.targets.derived_caches import Hook
from nemo_rl_reshard.targets.vllm_target import VllmTarget


def target_of_worker(worker: Any, mode: str = "auto", hooks: Mapping[str, Hook] | None = None) -> VllmTarget:
    """The target of one vLLM worker, whose model must be loaded. See VllmTarget for `mode` and `hooks`."""
    return VllmTarget(worker.model_runner.get_model(), worker.vllm_config, mode, hooks)
