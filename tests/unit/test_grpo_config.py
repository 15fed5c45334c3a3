"""The example's configuration: defaults chains, Hydra-style overrides, and every mistake in one error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nemo_rl_reshard.config import Backend
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.runtime.order import VerifyMode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo.config import load_config, refit_section

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "grpo_qwen_cpu.yaml"


def faults_of(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, overrides)
    return str(caught.value).split("\n  - ")[1:]


def test_the_recipe_stands_on_its_base_file() -> None:
    config = load_config(RECIPE, [])
    assert config["refit"]["backend"] == ["reshard"]
    assert config["policy"]["dp"] * config["policy"]["tp"] == 4
    assert sorted(config["generation"]["engines"]) == [1, 2]
    assert "defaults" not in config


def test_overrides_of_the_refit_section() -> None:
    config = load_config(RECIPE, ["refit.backend=gather_broadcast", "refit.route=ffn", "refit.verify=sample"])
    section = refit_section(config, config["refit"]["backend"][0])
    assert (section.backend, section.route, section.verify) == (
        Backend.GATHER_BROADCAST,
        RoutePolicy.FFN,
        VerifyMode.SAMPLE,
    )


@pytest.mark.parametrize("text", ["off", "'off'", "false"])
def test_verify_off_survives_yaml(text: str) -> None:
    """YAML reads a bare `off` as false."""
    config = load_config(RECIPE, [f"refit.verify={text}"])
    assert refit_section(config, "reshard").verify is VerifyMode.OFF


def test_keys_of_the_refit_section_that_the_recipe_leaves_out_can_be_given() -> None:
    config = load_config(RECIPE, ["refit.in_flight=3"])
    assert refit_section(config, "reshard").in_flight == 3


def test_several_backends_and_other_values() -> None:
    config = load_config(
        RECIPE, ["refit.backend=[reshard,gather_broadcast]", "grpo.num_steps=3", "policy.learning_rate=1e-3"]
    )
    assert config["refit"]["backend"] == ["reshard", "gather_broadcast"]
    assert (config["grpo"]["num_steps"], config["policy"]["learning_rate"]) == (3, 1e-3)


def test_every_mistake_comes_at_once() -> None:
    faults = faults_of(
        "refit.backend=reshad",
        "refit.bucket_byte=3",
        "grpo.num_step=3",
        "seed=x",
        "nonsense",
        "policy.learning_rate=-1",
        "generation.engines=[]",
        "grpo.stale_steps=[0]",
    )
    assert len(faults) == 8, faults
    for phrase in (
        "refit.backend",
        "did you mean 'bucket_bytes'",
        "did you mean 'grpo.num_steps'",
        "seed: 'x'",
        "'nonsense' is no override",
        "policy.learning_rate: -1",
        "generation.engines: []",
        "grpo.stale_steps",
    ):
        assert sum(phrase in fault for fault in faults) == 1, phrase


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    faults = faults_of("policy.tp=3", "grpo.answers_per_question=5")
    assert len(faults) == 2
    assert "model.num_kv_heads: 4 heads cannot be cut over policy.tp = 3" in faults[0]
    assert "30 samples a step" in faults[1]


def test_a_time_of_the_refit_section_may_be_a_fraction_though_the_recipe_writes_it_whole() -> None:
    config = load_config(RECIPE, ["refit.deadline_s=0.5", "refit.topology.fast_gb_per_s=2"])
    section = refit_section(config, "reshard")
    assert (section.deadline_s, section.topology.fast_gb_per_s) == (0.5, 2.0)
    assert faults_of("refit.deadline_s=soon", "refit.topology=3") == [
        "refit.deadline_s: input should be a valid number, unable to parse string as a number, got 'soon'",
        "refit.topology: input should be a valid dictionary or instance of TopologyConfig, got 3",
    ]


def test_a_file_that_stands_alone_and_lacks_keys_is_told_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 0\npolicy:\nrefit: {route: all}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["sed=1"])
    faults = str(caught.value).split("\n  - ")[1:]
    assert "did you mean 'seed'" in faults[0]
    for key in ("policy.dp", "policy.compute_dtype", "refit.backend", "loss.clip_low", "logger.run_dir"):
        assert sum(fault.startswith(f"{key}: missing") for fault in faults) == 1, key


def test_values_of_a_file_are_held_to_the_rules_of_overrides(tmp_path: Path) -> None:
    for name in ("grpo_base.yaml", "grpo_qwen_cpu.yaml"):
        (tmp_path / name).write_text((ROOT / "configs" / name).read_text())
    (tmp_path / "mine.yaml").write_text(
        "defaults: grpo_qwen_cpu.yaml\ngrpo: {num_steps: 2.5, stale_steps: 8}\n"
        "generation: {engines: 2}\nloss: {clip_low: -0.1}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "mine.yaml", [])
    faults = str(caught.value).split("\n  - ")[1:]
    assert [fault.split(":")[0] for fault in faults] == [
        "grpo.num_steps",
        "loss.clip_low",
        "generation.engines",
        "grpo.stale_steps",
    ]
    assert "2.5 is not a positive whole number" in faults[0]


def test_a_backend_named_twice_is_refused() -> None:
    assert faults_of("refit.backend=[reshard,reshard]") == ["refit.backend: ['reshard', 'reshard'] names one twice"]


def test_defaults_that_go_round_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: b.yaml\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle: a\.yaml -> b\.yaml -> a\.yaml"):
        load_config(tmp_path / "a.yaml", [])


def test_a_file_nearer_the_recipe_wins_over_what_it_stands_on(tmp_path: Path) -> None:
    for name in ("grpo_base.yaml", "grpo_qwen_cpu.yaml"):
        (tmp_path / name).write_text((ROOT / "configs" / name).read_text())
    (tmp_path / "mine.yaml").write_text("defaults: grpo_qwen_cpu.yaml\nseed: 7\nrefit: {route: ffn}\n")
    config = load_config(tmp_path / "mine.yaml", ["seed=8"])
    assert (config["seed"], config["refit"]["route"], config["policy"]["dp"]) == (8, "ffn", 2)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "defaults: nowhere.yaml\n"])
def test_files_that_cannot_be_read_are_config_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(path, [])
