"""Build a recipe's parts with NeMo RL's own functions, attach our synchronizer, and run NeMo RL's own loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
import yaml
from grpo.run_folder import environment

from nemo_rl_reshard.cli.requirements import EnvironmentLacksError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo import MasterConfig


class Parts(NamedTuple):
    """What NeMo RL's `setup` returns, in its order."""

    policy: Any
    policy_generation: Any
    nemo_gym: Any
    clusters: Any
    dataloader: Any
    val_dataloader: Any
    loss_fn: Any
    logger: Any
    checkpointer: Any
    grpo_save_state: Any
    master_config: Any
    teacher_worker_groups: Any
    alias_to_group_alias: Any


@dataclass(frozen=True, slots=True)
class Task:
    """Who asks and who grades: the tokenizer, and the environments by task, for training and for validation."""

    tokenizer: Any
    environments: Mapping[str, Any]
    val_environments: Mapping[str, Any]


def run(config: MasterConfig) -> Path:
    """Train as the recipe says; returns the folder with the logs.

    Raises EnvironmentLacksError if Ray has too few GPUs, RefitError if the last refit failed, also where NeMo RL's
    loop printed the failure and returned.
    """
    from nemo_rl.distributed.virtual_cluster import init_ray
    from nemo_rl.utils.logger import get_next_experiment_dir

    init_ray()
    _require_gpus(config.cluster)
    folder = Path(get_next_experiment_dir(config.logger["log_dir"]))
    config.logger["log_dir"] = str(folder)
    _note(folder, config)
    parts, task = _build(config)
    train(parts, task)
    return folder


def train(parts: Parts, task: Task) -> None:
    """Attach what the `refit:` section asks for and run the loop; everything is shut down however it ends."""
    with ExitStack() as ending:
        ending.callback(_shut_down, parts, task)
        synchronizer = attach(
            parts.policy, parts.policy_generation, parts.clusters, parts.master_config, logger=parts.logger
        )
        if synchronizer is not None:
            ending.enter_context(synchronizer)
        ending.enter_context(parts.checkpointer)
        _loop(parts, task)


def _build(config: MasterConfig) -> tuple[Parts, Task]:
    """Tokenizer, data, environments, then trainers and engines; `setup` also finds the checkpoint to resume from."""
    from nemo_rl.algorithms.grpo import setup
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.data.utils import setup_response_data
    from nemo_rl.models.generation import configure_generation_config

    policy = config.policy
    tokenizer = get_tokenizer(policy["tokenizer"])
    policy["generation"] = configure_generation_config(
        policy["generation"],
        tokenizer,
        has_refit_draft_weights=bool(policy["draft"]["enabled"]),
        trains_mtp=bool((policy.get("megatron_cfg") or {}).get("mtp_num_layers")),
    )
    dataset, val_dataset, environments, val_environments = setup_response_data(tokenizer, config.data, config.env)
    return Parts(*setup(config, tokenizer, dataset, val_dataset)), Task(tokenizer, environments, val_environments)


def _loop(parts: Parts, task: Task) -> None:
    from nemo_rl.algorithms.grpo import async_grpo_train, grpo_train

    shared = {
        "policy": parts.policy,
        "policy_generation": parts.policy_generation,
        "val_dataloader": parts.val_dataloader,
        "tokenizer": task.tokenizer,
        "loss_fn": parts.loss_fn,
        "task_to_env": task.environments,
        "val_task_to_env": task.val_environments,
        "logger": parts.logger,
        "checkpointer": parts.checkpointer,
        "grpo_save_state": parts.grpo_save_state,
        "master_config": parts.master_config,
    }
    async_grpo = parts.master_config.grpo.async_grpo
    if async_grpo is None or not async_grpo.enabled:
        grpo_train(wrapped_dataloader=parts.dataloader, **shared)
        return
    async_grpo_train(
        dataloader=parts.dataloader,
        max_trajectory_age_steps=async_grpo.max_trajectory_age_steps,
        teacher_worker_groups=parts.teacher_worker_groups,
        alias_to_group_alias=parts.alias_to_group_alias,
        **shared,
    )


def _shut_down(parts: Parts, task: Task) -> None:
    from nemo_rl.algorithms.grpo import shutdown_environments

    shutdown_environments(task.environments, task.val_environments)
    parts.policy_generation.shutdown()


def _require_gpus(cluster: Mapping[str, Any]) -> None:
    needed = cluster["num_nodes"] * cluster["gpus_per_node"]
    present = int(ray.cluster_resources().get("GPU", 0))
    if present < needed:
        raise EnvironmentLacksError(
            f"the recipe needs {needed} GPUs (cluster.num_nodes x cluster.gpus_per_node) and Ray has {present}; start "
            "Ray on all nodes first, or fit the recipe to what there is. Without GPUs: configs/grpo_qwen_cpu.yaml"
        )


def _note(folder: Path, config: MasterConfig) -> None:
    """Leave beside NeMo RL's logs what a run of the CPU loop leaves, for people and for `compare`."""
    plain = config.model_dump(mode="json")
    (folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    devices = [f"{config.cluster['num_nodes']} nodes x {config.cluster['gpus_per_node']} GPUs"]
    (folder / "environment.json").write_text(json.dumps(environment(devices), indent=2) + "\n", encoding="utf-8")
