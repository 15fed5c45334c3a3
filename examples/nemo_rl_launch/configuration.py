"""Read a recipe through NeMo RL's own loader and check it, `refit:` section included, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.integrations.nemo_rl.section import examine_section
from nemo_rl_reshard.integrations.nemo_rl.settings import Settings

if TYPE_CHECKING:
    from nemo_rl.algorithms.grpo import MasterConfig

NOT_ASYNC = (
    "grpo.use_dynamic_sampling",
    "grpo.reward_scaling.enabled",
    "grpo.reward_shaping.enabled",
    "data.use_multiple_dataloader",
)
"""Switches that NeMo RL's asynchronous loop does not have."""


def read_recipe(path: Path, overrides: Sequence[str]) -> MasterConfig:
    """The recipe as NeMo RL's MasterConfig, with Hydra overrides applied.

    Keys of the `refit` section may be given whether or not the recipe has them, as in the CPU loop. Raises ConfigError:
    for what NeMo RL refuses, or one that lists every violation of the section and of the keys it depends on.
    """
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.utils.config import (
        OverridesError,
        load_config,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )

    register_omegaconf_resolvers()
    try:
        config = load_config(path)
        config = parse_hydra_overrides(config, [_for_hydra(override) for override in overrides])
        plain: Any = OmegaConf.to_container(config, resolve=True)
        master_config = MasterConfig(**plain)
    except (OSError, YAMLError, OmegaConfBaseException, OverridesError, ValidationError) as fault:
        raise ConfigError(f"{path}: {fault}") from fault
    _check(master_config)
    return master_config


def _for_hydra(override: str) -> str:
    """Hydra wants a key that the files do not have marked with `++`."""
    return f"++{override}" if override.startswith("refit.") else override


def _check(config: MasterConfig) -> None:
    faults = FaultList("configuration", ConfigError)
    _, violated = examine_section(config)
    faults.extend(violated)
    faults.extend(_not_launched(Settings(config)))
    faults.raise_if_any()


def _not_launched(settings: Settings) -> Iterator[str]:
    """What NeMo RL has a launcher or a loop of its own for."""
    if settings.at("data_plane.enabled"):
        yield (
            "data_plane.enabled: this launcher runs grpo_train and async_grpo_train; use NeMo RL's run_grpo.py or "
            "run_grpo_single_controller.py, with the lines of docs/nemo-rl.md added"
        )
    if settings.at("grpo.async_grpo.enabled"):
        for key in NOT_ASYNC:
            if settings.at(key):
                yield f"{key}: NeMo RL's asynchronous loop does not have it; turn it or grpo.async_grpo.enabled off"
