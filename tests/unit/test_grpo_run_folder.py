"""RunFolder: the files and keys that a run leaves, readable by `compare` and by TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo.run_folder import RunFolder, without_refit

from nemo_rl_reshard.cli.run_folders import read_runs
from nemo_rl_reshard.runtime.report import RankReport, RefitReport

CONFIG = {"seed": 3, "logger": {"tensorboard": True}, "refit": {"backend": "reshard"}}


def write(path: Path, rewards: list[float]) -> None:
    with RunFolder(path, CONFIG) as folder:
        folder.plan({"schema": 1, "digest": "d"})
        for step, reward in enumerate(rewards):
            folder.step(
                {
                    "step": step,
                    "reward/mean": reward,
                    "refit/backend": "reshard",
                    "refit/seconds": 0.5,
                    "refit/bytes_received_sum": 10,
                    "logprob_gap/mean_abs": 1e-7,
                }
            )


def test_writes_everything_that_a_run_must_leave(tmp_path: Path) -> None:
    write(tmp_path / "run", [0.1, 0.2])
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()) == CONFIG
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert {"python", "versions", "host", "cores", "devices"} <= environment.keys()
    assert "torch" in environment["versions"]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["digest"] == "d"
    (record,) = read_runs([tmp_path / "run"])
    assert [step["reward/mean"] for step in record.steps] == [0.1, 0.2]


def test_tensorboard_has_the_same_keys_and_values(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path, [0.25, 0.5])
    events = loading.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.25), (1, 0.5)]
    assert "refit/seconds" in events.Tags()["scalars"]


def test_a_stale_step_has_every_key_and_the_version_that_is_still_served(tmp_path: Path) -> None:
    measured = RefitReport.of([RankReport(0, 1).to_plain()], backend="reshard").metrics()
    for step, served in ((1, 0), (3, 2), (4, 2)):
        metrics = without_refit(step, [1, 3, 4], "reshard")
        assert metrics.keys() == {*measured, "refit/skipped"}
        named = ("refit/backend", "refit/version", "refit/skipped")
        assert [metrics[key] for key in named] == ["reshard", served, True]
        assert {metrics[key] for key in measured if key not in named} == {None}
    with RunFolder(tmp_path, CONFIG) as folder:
        rest = {"reward/mean": 0.5, "logprob_gap/mean_abs": 1e-7}
        folder.step({"step": 0, **measured, **rest})
        folder.step({"step": 1, **without_refit(1, [1], "reshard"), **rest})
    (record,) = read_runs([tmp_path])
    assert [step["step"] for step in record.stale] == [1]


def test_a_second_run_replaces_the_first_and_leaves_other_files_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path, [0.1, 0.2, 0.3])
    write(tmp_path, [0.9])
    (record,) = read_runs([tmp_path])
    assert [step["reward/mean"] for step in record.steps] == [0.9]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_one_backend_takes_the_folder_several_take_one_inside_it_each() -> None:
    assert RunFolder.choose("runs/x", "reshard", 1) == Path("runs/x")
    assert RunFolder.choose("runs/x", "reshard", 2) == Path("runs/x/reshard")
    assert RunFolder.choose(None, "reshard", 1).name.endswith("-reshard")
