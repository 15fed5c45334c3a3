"""`compare` on small synthetic run folders: figures, ratio, picture, and every fault of every folder at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equipment.command import Command

from nemo_rl_reshard.cli.run_records import PHASES


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def step(index: int, backend: str, seconds: float | None, **more: Any) -> dict[str, Any]:
    metrics: dict[str, Any] = {
        "step": index,
        "reward/mean": 0.1 * index,
        "refit/backend": backend,
        "refit/seconds": seconds,
        "logprob_gap/mean_abs": 1e-6 if seconds is not None else 0.3,
    }
    if seconds is not None:
        metrics |= {"refit/bytes_received_sum": 300, "refit/bytes_received_max": 200, "refit/direct_share": 1.0}
        metrics |= {f"refit/seconds_{phase}": 0.0 for phase in PHASES}
        metrics |= {"refit/seconds_network": seconds / 2, "refit/seconds_pack": seconds / 4}
    return metrics | more


def write_run(folder: Path, steps: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    return folder


def two_runs(folder: Path) -> list[Path]:
    fast = [step(index, "reshard", seconds) for index, seconds in enumerate((0.9, 0.2, 0.3, None, 0.2, 0.4))]
    slow = [step(index, "gather_broadcast", 3 * (index + 1)) for index in range(3)]
    return [write_run(folder / "fast", fast), write_run(folder / "slow", slow)]


def test_medians_spread_ratio_and_the_stale_step(command: Command) -> None:
    ended = command("compare", *two_runs(command.folder), "--json", "compare.json")
    assert (ended.code, ended.err) == (0, "")
    fast, slow = json.loads((command.folder / "compare.json").read_text())["runs"]
    # The step without a refit is left out of the refit's figures, and its gap is told apart.
    assert fast["refit_seconds"] == {"median": 0.3, "min": 0.2, "max": 0.9}
    assert (fast["steps"], fast["refits"]) == (6, 5)
    assert (fast["logprob_gap"]["mean"], fast["stale_gap"]) == (1e-6, 0.3)
    assert fast["reward"] == {"first": pytest.approx(0.2), "last": pytest.approx(0.3)}
    assert (fast["phases"]["network"], fast["phases"]["pack"], fast["phases"]["verify"]) == (0.15, 0.075, 0)
    assert (fast["ratio_to_first"], slow["ratio_to_first"]) == (1.0, pytest.approx(20.0))
    assert slow["stale_gap"] is None


def test_writes_the_picture_where_it_says(command: Command) -> None:
    runs = two_runs(command.folder)
    out = command("compare", *runs).out
    assert "refit_timings.png" in out
    picture = (command.folder / "refit_timings.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000
    command("compare", runs[0], "--plot", "elsewhere/one.png")
    assert (command.folder / "elsewhere" / "one.png").exists()


def test_prints_one_row_per_run(command: Command) -> None:
    out = command("compare", *two_runs(command.folder)).out
    assert "20.00x" in out
    # Once among the refits, once among the phases; 80 columns are enough for both.
    assert out.count("gather_broadcast") == 2


def test_every_fault_of_every_folder_comes_at_once_and_nothing_is_written(command: Command) -> None:
    folder = command.folder
    good = two_runs(folder)[0]
    broken = write_run(folder / "broken", [step(0, "reshard", 1.0)])
    (broken / "metrics.jsonl").write_text('{"step": 0}\nnot json\n[1]\n')
    stale_only = write_run(folder / "stale", [step(0, "reshard", None)])
    ended = command("compare", good, folder / "nowhere", broken, stale_only, "--json", "compare.json")
    assert ended.code == 2
    assert len(ended.faults) == 5
    assert "nowhere" in ended.faults[0]
    assert "line 1: lacks refit/backend" in ended.faults[1]
    assert "line 2: is not JSON" in ended.faults[2]
    assert "line 3: is not an object" in ended.faults[3]
    assert "no step with a refit" in ended.faults[4]
    assert not (folder / "refit_timings.png").exists()
    assert not (folder / "compare.json").exists()


def test_runs_of_one_backend_are_told_apart_by_folder(command: Command) -> None:
    runs = [write_run(command.folder / name, [step(0, "reshard", 1.0)]) for name in ("seed0", "seed1")]
    out = command("compare", *runs).out
    assert "seed0" in out
    assert "seed1" in out


def test_figures_that_are_no_numbers_are_named(command: Command) -> None:
    """A diverged run logs NaN, a broken one a text: neither ends in a picture of nothing."""
    steps = [
        step(0, "reshard", 1.0, **{"logprob_gap/mean_abs": float("nan")}),
        step(1, "reshard", 1.0, **{"reward/mean": None, "refit/seconds_pack": "fast"}),
        step(2, "reshard", 1.0),
    ]
    ended = command("compare", write_run(command.folder / "run", steps), "--json", "compare.json")
    assert ended.code == 2
    assert len(ended.faults) == 2
    assert "line 1: no finite numbers: logprob_gap/mean_abs nan" in ended.faults[0]
    assert "line 2: no finite numbers: refit/seconds_pack 'fast', reward/mean None" in ended.faults[1]
    assert not (command.folder / "compare.json").exists()


def test_a_folder_with_brackets_and_a_picture_of_any_name(command: Command) -> None:
    run = write_run(command.folder / "[red]seed[", [step(0, "reshard", 1.0)])
    ended = command("compare", run, "--plot", "picture")
    assert (ended.code, ended.err) == (0, "")
    assert "[red]seed[" in ended.out
    assert (command.folder / "picture").read_bytes().startswith(b"\x89PNG")
    assert command("compare", run, "--plot", run).code == 2
