"""The launcher with a NeMo RL recipe: which loop a file means, what it says is missing, and what it calls when."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from equipment.nemo_checkout import write_checkout

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import grpo_qwen
from nemo_rl_launch import train
from nemo_rl_launch.recognise import is_recipe

from nemo_rl_reshard.errors import RefitError

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "nemo_rl" / "grpo-qwen3-1.7b-1n8g-fsdp2.yaml"


def forget_nemo_rl() -> None:
    for name in [name for name in sys.modules if name == "nemo_rl" or name.startswith("nemo_rl.")]:
        del sys.modules[name]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A miniature of NeMo RL named by NEMO_RL, eight GPUs in Ray's books, and nothing left behind."""
    root = write_checkout(tmp_path / "checkout")
    monkeypatch.setenv("NEMO_RL", str(root))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(train.ray, "cluster_resources", lambda: {"GPU": 8.0})
    monkeypatch.chdir(tmp_path)
    forget_nemo_rl()
    yield root
    forget_nemo_rl()


class Attached:
    """Stands for the synchronizer: on leaving, it raises what the last refit raised."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: Any) -> None:
        calls().append(("left",))
        if self.failure is not None:
            raise self.failure


def calls() -> list[Any]:
    import nemo_rl

    return nemo_rl.calls


def attach_by(monkeypatch: pytest.MonkeyPatch, synchronizer: Attached | None) -> None:
    def attach(policy: Any, policy_generation: Any, clusters: Any, config: Any, *, logger: Any) -> Attached | None:
        calls().append(("attach", policy, clusters, config.refit["backend"]))
        logger.log_metrics({"reshard_init_time_s": 1.0}, step=0, prefix="timing/setup")
        return synchronizer

    monkeypatch.setattr(train, "attach", attach)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "nemo_rl").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_recognised(path: Path) -> None:
    assert is_recipe(path)


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("policy: {model_name: Qwen/Qwen3-8B}\n", True),
        ("cluster: {gpus_per_node: 8}\n", True),
        ("defaults: [mine.yaml, '${oc.env:NEMO_RL}/examples/configs/grpo_math_1B.yaml']\n", True),
        ("defaults: below.yaml\nseed: 3\n", True),
        ("defaults: config.yaml\n", False),
        ("policy: {dp: 2, tp: 2}\ncluster: {num_cpus: 8}\n", False),
        ("policy: [\n", False),
        ("- 1\n", False),
    ],
)
def test_which_loop_a_file_means(tmp_path: Path, text: str, recipe: bool) -> None:
    (tmp_path / "below.yaml").write_text("policy: {generation: {backend: vllm}}\n")
    (tmp_path / "config.yaml").write_text(text)
    assert is_recipe(tmp_path / "config.yaml") is recipe


def test_the_cpu_loops_configuration_and_a_file_that_is_not_there_are_the_cpu_loops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_recipe(ROOT / "configs" / "grpo_qwen_cpu.yaml")
    assert grpo_qwen.main(["--config", str(tmp_path / "nowhere.yaml")]) == 2
    assert "nowhere.yaml" in capsys.readouterr().out


def test_without_nemo_rl_the_message_names_it_and_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NEMO_RL", raising=False)
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    assert grpo_qwen.main(["--config", str(RECIPE)]) == 3
    out = capsys.readouterr().out
    assert "nemo-rl: missing" in out
    assert "source repository" in out


def test_a_variable_that_names_no_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEMO_RL", str(tmp_path))
    assert grpo_qwen.main(["--config", str(RECIPE)]) == 3
    assert f"NEMO_RL={tmp_path} has no examples/configs/grpo_math_1B.yaml" in capsys.readouterr().out


def test_without_gpus_nothing_is_built(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train.ray, "cluster_resources", lambda: {"CPU": 2.0})
    assert grpo_qwen.main(["--config", str(RECIPE)]) == 3
    out = capsys.readouterr().out
    assert "needs 8 GPUs" in out
    assert "configs/grpo_qwen_cpu.yaml" in out
    assert [name for name, *_ in calls()] == ["init_ray"]


def test_the_loop_runs_between_attaching_and_shutting_down(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attach_by(monkeypatch, Attached())
    assert grpo_qwen.main(["--config", str(RECIPE)]) == 0
    started, *rest = calls()
    # Workers find this package first, what the user gave them after it, and NeMo RL.
    assert {str(ROOT), str(checkout), "/elsewhere"} == set(started[1].split(os.pathsep))
    assert rest == [
        ("setup", "tokenizer of Qwen/Qwen3-1.7B", "dataset", "validation dataset"),
        ("attach", "policy", ("training", "inference"), "reshard"),
        ("log_metrics", ["reshard_init_time_s"], 0, "timing/setup"),
        ("grpo_train", "policy", "loader", "grader"),
        ("flushed",),
        ("left",),
        ("shutdown", "grader", "validation grader"),
        ("shutdown", "generation"),
    ]
    folder = tmp_path / "logs" / "grpo-qwen3-1.7b-1n8g-fsdp2-reshard" / "exp_001"
    noted = yaml.safe_load((folder / "config.yaml").read_text())
    assert noted["refit"]["backend"] == "reshard"
    assert noted["logger"]["log_dir"] == str(folder.relative_to(tmp_path))


def test_the_asynchronous_loop_and_overrides(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attach_by(monkeypatch, None)
    overrides = ["grpo.async_grpo.enabled=true", "refit.backend=nemo_rl", "refit.in_flight=3"]
    assert grpo_qwen.main(["--config", str(RECIPE), *overrides, "grpo.async_grpo.max_trajectory_age_steps=2"]) == 0
    names = [name for name, *_ in calls()]
    # Nothing of ours is attached, so there is nothing to leave.
    built, ended = ["init_ray", "setup", "attach", "log_metrics"], ["flushed", "shutdown", "shutdown"]
    assert names == [*built, "async_grpo_train", *ended]
    assert ("async_grpo_train", "policy", "loader", 2) in calls()


def test_a_refit_that_the_loop_only_printed_ends_the_launcher(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attach_by(monkeypatch, Attached(RefitError("refit failed: rank 3 died", {"3": "died"}, {})))
    assert grpo_qwen.main(["--config", str(RECIPE)]) == 1
    assert "rank 3" in capsys.readouterr().out
    assert calls()[-1] == ("shutdown", "generation")


def test_six_mistakes_are_one_error_before_ray_starts(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = [
        "refit.backend=reshad",
        "refit.bucket_byte=3",
        "policy.generation.colocated.enabled=true",
        "policy.generation.vllm_cfg.pipeline_parallel_size=2",
        "data_plane.enabled=true",
        "grpo.async_grpo.enabled=true",
        "grpo.use_dynamic_sampling=true",
    ]
    assert grpo_qwen.main(["--config", str(RECIPE), *mistakes]) == 2
    faults = capsys.readouterr().out.rstrip().split("\n  - ")[1:]
    assert len(faults) == 6, faults
    for fault, key in zip(
        faults,
        (
            "refit.backend",
            "refit.bucket_byte",
            "policy.generation.colocated",
            "policy.generation.vllm_cfg.pipeline",
            "data_plane.enabled",
            "grpo.use_dynamic_sampling",
        ),
        strict=True,
    ):
        assert fault.startswith(key), fault
    assert calls() == []


def test_what_nemo_rl_refuses_is_a_faulty_configuration(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo_qwen.main(["--config", str(RECIPE), "grpo.max_num_stepz=3"]) == 2
    assert "'grpo.max_num_stepz' is not in struct" in capsys.readouterr().out
    assert grpo_qwen.main(["--config", str(RECIPE), "grpo.max_num_steps=many"]) == 2
    assert "max_num_steps" in capsys.readouterr().out
