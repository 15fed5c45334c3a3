"""Configurations that NeMo RL ships, read by its loader into its MasterConfig: accepted, or refused for just what."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from nemo_rl.utils.config import load_config, parse_hydra_overrides, register_omegaconf_resolvers
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from nemo_rl_launch.configuration import read_recipe

from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlBackend, read_section

GENERATION = "policy.generation"
APART = f"{GENERATION}.colocated.enabled=false"
MEGATRON = "policy.megatron_cfg.enabled"

# With the loop whose MasterConfig they are for. As shipped, trainers and engines are apart.
ACCEPTED = [
    ("grpo", "recipes/llm/grpo-llama3.1-8b-instruct-2n8g-fsdp2tp1-noncolocated.yaml"),
    ("grpo", "recipes/llm/grpo-llama3.1-8b-instruct-2n8g-fsdp2tp1-noncolocated-tq_simple.yaml"),
    ("distillation", "recipes/llm/distillation-qwen3-32b-to-4b-base-2n8g-fsdp2tp8-noncolocated.v1.yaml"),
    ("ppo", "recipes/llm/ppo-qwen2.5-1.5b-gsm8k-1n8g-automodel-noncolocated-async.yaml"),
]

# Exactly these keys, and no other.
REFUSED = {
    "grpo_math_1B.yaml": {f"{GENERATION}.colocated.enabled"},
    "grpo_math_1B_sglang.yaml": {f"{GENERATION}.colocated.enabled", f"{GENERATION}.backend"},
    "grpo_math_8B_megatron_nixl.yaml": {f"{GENERATION}.refit_transport", MEGATRON},
    "recipes/llm/grpo-qwen3-30ba3b-4n8g-megatron-zmq-deltaweight-noncolocated.yaml": {
        f"{GENERATION}.refit_transport",
        MEGATRON,
    },
    "recipes/llm/grpo-qwen3-1.7b-1n8g-megatron-eagle3.yaml": {
        f"{GENERATION}.colocated.enabled",
        f"{GENERATION}.vllm_kwargs.speculative_config",
        "policy.draft.enabled",
        MEGATRON,
    },
    "recipes/llm/grpo-qwen3-8b-base-1n8g-fp8-kvcache-megatron.yaml": {
        f"{GENERATION}.colocated.enabled",
        f"{GENERATION}.vllm_cfg.precision",
        f"{GENERATION}.vllm_cfg.kv_cache_dtype",
        MEGATRON,
    },
    "recipes/llm/grpo-qwen3-30ba3b-4n4g-megatron-qa-nvfp4-w4a4-real.yaml": {
        f"{GENERATION}.colocated.enabled",
        f"{GENERATION}.quant_cfg",
        f"{GENERATION}.real_quant",
        "policy.quant_cfg",
        MEGATRON,
    },
    "recipes/llm/grpo-qwen3.5-397ba17b-32n8g-megatron.v2.yaml": {
        f"{GENERATION}.colocated.enabled",
        f"{GENERATION}.vllm_cfg.expert_parallel_size",
        MEGATRON,
    },
}


def load(checkout: Path, name: str, *overrides: str) -> DictConfig:
    """As NeMo RL's own launchers do, overrides of the command line included."""
    register_omegaconf_resolvers()
    return parse_hydra_overrides(load_config(checkout / "examples" / "configs" / name), list(overrides))


def master_config(loop: str, container: DictConfig) -> BaseModel:
    plain = OmegaConf.to_container(container, resolve=True)
    assert isinstance(plain, dict)
    made: BaseModel = importlib.import_module(f"nemo_rl.algorithms.{loop}").MasterConfig(**plain)
    return made


def refused_keys(config: Any) -> set[str]:
    try:
        read_section(config)
    except ConfigError as refused:
        return {fault.split(": ")[0] for fault in str(refused).split("\n  - ")[1:]}
    return set()


@pytest.mark.parametrize(("loop", "name"), ACCEPTED)
def test_recipes_with_trainers_and_engines_apart_are_accepted_as_they_are(loop: str, name: str, checkout: Path) -> None:
    container = load(checkout, name, "++refit.backend=gather_broadcast", "++refit.deadline_s=30")
    for config in (container, master_config(loop, container)):
        section = read_section(config)
        assert (section.backend, section.deadline_s) == (NemoRlBackend.GATHER_BROADCAST, 30.0)


@pytest.mark.parametrize(("name", "keys"), REFUSED.items())
def test_recipes_for_what_is_not_served_are_refused_for_just_that(name: str, keys: set[str], checkout: Path) -> None:
    """B55, B56, B74: the same from the container and from NeMo RL's MasterConfig, and nothing if it refits itself."""
    container = load(checkout, name)
    assert refused_keys(container) == keys
    assert refused_keys(master_config("grpo", container)) == keys
    assert refused_keys(load(checkout, name, "++refit.backend=nemo_rl")) == set()


def test_a_mistake_among_overrides_is_named_together_with_what_the_recipe_brings(checkout: Path) -> None:
    container = load(checkout, "grpo_math_1B.yaml", "++refit.bakend=reshard", "++refit.verify=off")
    assert refused_keys(master_config("grpo", container)) == {"refit.bakend", f"{GENERATION}.colocated.enabled"}


def test_the_launcher_names_the_mistakes_of_a_command_line_and_of_the_recipe_in_one_error(checkout: Path) -> None:
    """B74: through the launcher as through `attach`, before anything is started."""
    recipe = checkout / "examples" / "configs" / "grpo_math_1B.yaml"
    with pytest.raises(ConfigError) as refused:
        read_recipe(recipe, ["refit.rout=all", f"{GENERATION}.vllm_cfg.pipeline_parallel_size=2"])
    assert [fault.split(": ")[0] for fault in str(refused.value).split("\n  - ")[1:]] == [
        "refit.rout",
        f"{GENERATION}.colocated.enabled",
        f"{GENERATION}.vllm_cfg.pipeline_parallel_size",
    ]


def test_dtensor_recipes_moved_apart_are_refused_for_another_engine_alone(checkout: Path) -> None:
    """Every shipped GRPO recipe of the kind: a rule that strikes at a default of NeMo RL would show here."""
    recipes = sorted((checkout / "examples" / "configs" / "recipes" / "llm").glob("grpo-*fsdp2*.yaml"))
    assert len(recipes) > 10
    for recipe in recipes:
        container = load(checkout, str(recipe), APART)
        is_vllm = container.policy.generation.backend == "vllm"
        assert refused_keys(container) == (set() if is_vllm else {f"{GENERATION}.backend"}), recipe.name
