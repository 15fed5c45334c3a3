"""Our recipes and launcher against the real NeMo RL: its loader, its MasterConfig, the signatures that are called."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import yaml
from nemo_rl.algorithms import grpo
from nemo_rl.algorithms import utils as algorithm_parts
from nemo_rl.data import utils as data_parts
from nemo_rl.distributed import virtual_cluster
from nemo_rl.models import generation

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import nemo_rl_launch.train as launched
from nemo_rl_launch.checkout import use_checkout
from nemo_rl_launch.configuration import read_recipe

from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlBackend, read_section

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "nemo_rl").glob("grpo-*.yaml"))
RECIPE = ROOT / "configs" / "nemo_rl" / "grpo-qwen3-1.7b-1n8g-fsdp2.yaml"
WRITTEN_TO = {"refit.backend", "logger.log_dir", "checkpointing.checkpoint_dir"}


@pytest.fixture(autouse=True)
def _named(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL", str(checkout))


def leaves(plain: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(plain, dict) and plain:
        return {name: value for key, part in plain.items() for name, value in leaves(part, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): plain}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_nemo_rl_and_our_rules_accept_every_recipe(path: Path, checkout: Path) -> None:
    config = read_recipe(path, ["refit.verify=full", "grpo.max_num_steps=2"])
    assert isinstance(config, grpo.MasterConfig)
    assert read_section(config).verify == "full"
    assert config.grpo.max_num_steps == 2
    assert not config.policy["generation"]["colocated"]["enabled"]
    assert Path(config.data["default"]["prompt_file"]) == checkout / "examples" / "prompts" / "cot.txt"
    assert Path(config.data["default"]["prompt_file"]).exists()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_change_only_keys_that_nemo_rls_base_has(path: Path, checkout: Path) -> None:
    """MasterConfig takes unknown keys in silence, so a misspelt one would change nothing."""
    base = leaves(
        read_recipe(checkout / "examples" / "configs" / "grpo_math_1B.yaml", ["refit.backend=nemo_rl"]).model_dump()
    )
    ours = leaves(read_recipe(path, []).model_dump())
    new = {key for key in ours.keys() - base.keys() if not key.startswith("refit.")}
    known = {"policy.dtensor_cfg.expert_parallel_size", "policy.generation.vllm_kwargs.moe_backend"}
    assert {key for key in new if not key.startswith("policy.dtensor_cfg.automodel_kwargs.backend.")} <= known


@pytest.mark.parametrize("path", [each for each in RECIPES if "gather" not in each.stem], ids=lambda path: path.stem)
def test_twins_are_the_same_run_with_the_other_backend(path: Path) -> None:
    ours = leaves(read_recipe(path, []).model_dump())
    twins = leaves(read_recipe(path.with_stem(f"{path.stem}-gather_broadcast"), []).model_dump())
    assert {key for key in ours if ours[key] != twins[key]} == WRITTEN_TO
    assert twins["refit.backend"] == NemoRlBackend.GATHER_BROADCAST


def test_the_asynchronous_loop_as_the_docs_ask_for_it() -> None:
    overrides = [
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.in_flight_weight_updates=true",
        "policy.generation.vllm_cfg.async_engine=true",
        "loss_fn.use_importance_sampling_correction=true",
    ]
    assert read_recipe(RECIPE, overrides).grpo.async_grpo.in_flight_weight_updates


def test_what_hydra_refuses_is_a_faulty_configuration() -> None:
    with pytest.raises(ConfigError, match=r"grpo\.max_num_stepz"):
        read_recipe(RECIPE, ["grpo.max_num_stepz=3"])


def test_a_shipped_configuration_of_nemo_rl_is_told_everything_at_once(checkout: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_recipe(checkout / "examples" / "configs" / "grpo_math_1B_megatron.yaml", ["refit.bakend=reshard"])
    keys = {fault.split(": ")[0] for fault in str(caught.value).split("\n  - ")[1:]}
    assert keys == {"refit.bakend", "policy.generation.colocated.enabled", "policy.megatron_cfg.enabled"}


def test_the_checkout_is_found_by_the_variable_and_without_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    assert use_checkout() == checkout
    monkeypatch.delenv("NEMO_RL")
    assert use_checkout() == checkout


@pytest.mark.parametrize("loop", ["grpo_train", "async_grpo_train"])
def test_nemo_rls_functions_take_what_the_launcher_gives_them(
    loop: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """B67: every one is replaced by a recorder with its own signature, so a renamed argument is a TypeError here."""
    parts = [SimpleNamespace(name=str(index)) for index in range(13)]
    config = read_recipe(
        RECIPE, [f"grpo.async_grpo.enabled={loop == 'async_grpo_train'}", f"logger.log_dir={tmp_path}"]
    )
    parts[1].shutdown = lambda: True
    parts[7], parts[8], parts[10] = SimpleNamespace(), nullcontext(), config
    replaced = {
        (virtual_cluster, "init_ray"): None,
        (algorithm_parts, "get_tokenizer"): "tokenizer",
        (generation, "configure_generation_config"): config.policy["generation"],
        (data_parts, "setup_response_data"): ("dataset", None, {"math": "grader"}, {}),
        (grpo, "setup"): tuple(parts),
        (grpo, "grpo_train"): None,
        (grpo, "async_grpo_train"): None,
        (grpo, "shutdown_environments"): None,
    }
    for (module, name), answer in replaced.items():
        monkeypatch.setattr(module, name, create_autospec(getattr(module, name), return_value=answer))
    monkeypatch.setattr(launched.ray, "cluster_resources", lambda: {"GPU": 8.0})
    attached = []
    monkeypatch.setattr(launched, "attach", lambda *given, logger: attached.append((*given, logger)) or nullcontext())
    folder = launched.run(config)
    assert attached == [(parts[0], parts[1], parts[3], config, parts[7])]
    assert [getattr(grpo, name).called for name in ("grpo_train", "async_grpo_train")] == [
        loop == "grpo_train",
        loop != "grpo_train",
    ]
    assert grpo.setup.call_args.args[1:] == ("tokenizer", "dataset", None)
    assert folder == tmp_path / "exp_001"
    assert yaml.safe_load((folder / "config.yaml").read_text())["policy"]["model_name"] == "Qwen/Qwen3-1.7B"


def test_setup_returns_the_parts_in_the_order_that_the_launcher_names() -> None:
    """The names are those of its own documentation, which lists all thirteen."""
    documented = " ".join(str(grpo.setup.__doc__).split("in order:")[1].split())
    places = [
        documented.find(name.removesuffix("s") if name == "clusters" else name) for name in launched.Parts._fields
    ]
    assert -1 not in places
    assert places == sorted(places)
