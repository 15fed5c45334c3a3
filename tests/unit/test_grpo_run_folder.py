"""RunFolder: the files and keys that a run leaves, readable by `compare` and by TensorBoard."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from grpo.run_folder import RunFolder

from nemo_rl_reshard.cli.run_records import read_runs

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
