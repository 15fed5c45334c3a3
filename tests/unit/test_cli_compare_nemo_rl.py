"""`compare` on folders that NeMo RL logged to: its own keys, refits of every backend, and what its log does not say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from equipment.command import Command

from nemo_rl_reshard.cli.run_records import LOOP_SECONDS, PHASES

tensorboard = pytest.importorskip("torch.utils.tensorboard")

OF_A_RESHARD = {"bytes_received_sum": 300.0, "bytes_received_max": 200.0, "direct_share": 1.0}


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def write_log(folder: Path, steps: Sequence[Mapping[str, float]], hyperparameters: Mapping[str, Any]) -> Path:
    """What NeMo RL's TensorboardLogger writes: the configuration by dotted keys first, then scalars by step."""
    writer = tensorboard.SummaryWriter(log_dir=str(folder / "tensorboard"))
    writer.add_hparams({"policy.model_name": "Qwen/Qwen3-1.7B", "grpo.seed": 42, **hyperparameters}, {})
    for number, step in enumerate(steps, start=1):
        for key, value in step.items():
            writer.add_scalar(key, value, number)
    writer.close()
    return folder


def reshard_step(seconds: float) -> dict[str, float]:
    phases = dict.fromkeys(PHASES, 0.0) | {"network": seconds / 2, "install": seconds / 4}
    return {
        "train/reward": 0.5,
        "train/token_mult_prob_error": 1.01,
        "train/loss": 3.0,
        LOOP_SECONDS: seconds + 0.1,
        f"{LOOP_SECONDS}/reshard_network": seconds / 2,
        "refit/seconds": seconds,
        **{f"refit/seconds_{phase}": took for phase, took in phases.items()},
        **{f"refit/{key}": value for key, value in OF_A_RESHARD.items()},
    }


def own_step(seconds: float) -> dict[str, float]:
    return {"train/reward": 0.25, "train/token_mult_prob_error": 1.02, LOOP_SECONDS: seconds}


def compared(command: Command, *runs: Path) -> tuple[list[dict[str, Any]], str]:
    ended = command("compare", *runs, "--json", "compare.json")
    assert (ended.code, ended.err) == (0, "")
    return json.loads((command.folder / "compare.json").read_text())["runs"], ended.out


def test_two_backends_of_this_package_are_compared_as_in_the_cpu_loop(command: Command) -> None:
    # After validation NeMo RL needs no refit: such a step has no seconds, and is not one that was left out.
    steps = [reshard_step(0.5), reshard_step(1.0), {"train/reward": 0.5, "train/token_mult_prob_error": 1.0}]
    fast = write_log(command.folder / "exp_001", [*steps, reshard_step(0.75)], {"refit.backend": "reshard"})
    slow = write_log(command.folder / "exp_002", [reshard_step(1.5)], {"refit.backend": "gather_broadcast"})
    (first, second), out = compared(command, fast, slow)
    assert [first["backend"], second["backend"]] == ["reshard", "gather_broadcast"]
    assert first["measure"] == "refit/seconds"
    assert first["refit_seconds"] == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert (first["steps"], first["refits"], first["stale_gap"]) == (4, 3, None)
    assert (first["phases"]["network"], first["phases"]["pack"]) == (0.375, 0)
    assert (first["bytes_received_sum"], first["bytes_received_max"], first["direct_share"]) == (300, 200, 1.0)
    assert first["reward"] == {"first": 0.5, "last": 0.5}
    assert first["logprob_gap"] is None
    assert first["token_mult_prob_error"]["mean"] == pytest.approx(1.01)
    assert second["ratio_to_first"] == 2.0
    assert "x 1.0100" in out
    assert (command.folder / "refit_timings.png").read_bytes().startswith(b"\x89PNG")


def test_against_nemo_rls_own_refit_both_are_measured_by_its_timer_and_nothing_is_made_up(command: Command) -> None:
    ours = write_log(command.folder / "ours", [reshard_step(0.4)], {"refit.backend": "reshard"})
    theirs = write_log(command.folder / "theirs", [own_step(2.0)], {"refit.backend": "nemo_rl"})
    (first, second), out = compared(command, ours, theirs)
    assert {first["measure"], second["measure"]} == {LOOP_SECONDS}
    assert first["refit_seconds"]["median"] == pytest.approx(0.5)
    assert second["backend"] == "nemo_rl"
    assert second["ratio_to_first"] == pytest.approx(4.0)
    for key in ("phases", "bytes_received_sum", "bytes_received_max", "direct_share", "logprob_gap"):
        assert second[key] is None, key
    assert "not logged" in out
    assert f"seconds are {LOOP_SECONDS}" in out


def test_a_run_whose_refit_was_never_attached_is_not_called_by_the_backend_it_asked_for(command: Command) -> None:
    """A stock launcher reads the section and passes it by."""
    run = write_log(command.folder / "run", [own_step(2.0)], {"refit.backend": "reshard"})
    (summary,), out = compared(command, run)
    assert summary["backend"] == "nemo_rl"
    assert "asked for refit.backend reshard" in out


def test_a_transport_of_nemo_rl_is_named(command: Command) -> None:
    keys = {"policy.generation.refit_transport": "nccl_reshard"}
    (summary,), out = compared(command, write_log(command.folder / "run", [own_step(1.0)], keys))
    assert summary["backend"] == "nemo_rl (nccl_reshard)"
    assert "asked for" not in out


def test_runs_without_a_common_measure_are_refused(command: Command) -> None:
    """The asynchronous loop passes no timer to NeMo RL's own refit."""
    sync = write_log(command.folder / "sync", [own_step(2.0)], {})
    other = write_log(command.folder / "async", [{"timing/train/weight_sync": 3.0}], {})
    ended = command("compare", sync, other)
    assert ended.code == 2
    assert len(ended.faults) == 3
    assert f"sync: times its refits as {LOOP_SECONDS} alone" in ended.faults[0]
    assert "async: times its refits as timing/train/weight_sync alone" in ended.faults[1]
    assert not (command.folder / "refit_timings.png").exists()


def test_a_log_without_refits_and_one_that_diverged_are_named(command: Command) -> None:
    empty = write_log(command.folder / "empty", [{"train/reward": 1.0}], {})
    diverged = write_log(command.folder / "diverged", [own_step(1.0) | {"train/reward": float("nan")}], {})
    ended = command("compare", empty, diverged)
    assert ended.code == 2
    assert len(ended.faults) == 2
    assert "has no seconds of any refit" in ended.faults[0]
    assert "step 1: no finite number: train/reward nan" in ended.faults[1]


def test_beside_a_run_of_the_cpu_loop(command: Command) -> None:
    theirs = write_log(command.folder / "theirs", [reshard_step(0.5)], {"refit.backend": "reshard"})
    folder = command.folder / "cpu"
    folder.mkdir()
    step = {"step": 0, "reward/mean": 0.5, "refit/backend": "reshard", "refit/seconds": 0.25, "refit/skipped": False}
    step |= {"logprob_gap/mean_abs": 1e-6, "refit/bytes_received_sum": 10}
    (folder / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    (first, second), out = compared(command, theirs, folder)
    assert (first["ratio_to_first"], second["ratio_to_first"]) == (1.0, 0.5)
    assert "1.0e-06" in out
