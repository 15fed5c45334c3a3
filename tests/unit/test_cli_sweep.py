"""`plan --sweep`: layouts from a file or all that fit, ranked; bad layouts listed with the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equipment.command import Command
from equipment.model_specs import DENSE, EXPERTS, model_spec, write_spec


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def swept(command: Command, plain: dict[str, Any], layouts: str) -> dict[str, Any]:
    ended = command("plan", write_spec(command.folder, plain), "--sweep", layouts, "--json", "out.json")
    assert (ended.code, ended.err) == (0, "")
    return json.loads((command.folder / "out.json").read_text())


def sizes(row: dict[str, Any], side: str = "target") -> dict[str, int]:
    return {key: value for key, value in row[side].items() if key not in ("backend", "world")}


def test_layouts_of_a_file_are_ranked_with_the_specs_own_among_them(command: Command) -> None:
    command.write("layouts.yaml", "target: [{tp: 4}, {tp: 1, dp: 4}, {tp: 2}]\n")
    result = swept(command, model_spec(command.folder), "layouts.yaml")
    # tp 2 with dp left out is the spec's own tp 2 x dp 2, and is planned once.
    assert [sizes(row) for row in result["rows"] if row["as_given"]] == [{"tp": 2, "dp": 2}]
    assert len(result["rows"]) == 3
    seconds = [row["seconds"] for row in result["rows"]]
    assert seconds == sorted(seconds)
    by_tp = {row["target"]["tp"]: row for row in result["rows"]}
    assert by_tp[1]["weights_bytes"] > by_tp[2]["weights_bytes"] > by_tp[4]["weights_bytes"]
    assert all(row["seconds"] >= row["floor_seconds"] > 0 for row in result["rows"])


def test_every_source_is_tried_with_every_target(command: Command) -> None:
    command.write(
        "layouts.json",
        json.dumps({"sweep": {"source": [{"tp": 4}, {"dp_shard": 4}], "target": [{"tp": 4}, {"tp": 2}]}}),
    )
    rows = swept(command, model_spec(command.folder), "layouts.json")["rows"]
    assert len(rows) == 5  # four pairs and the spec's own
    assert {(row["source"].get("tp", 1), row["target"]["tp"]) for row in rows} == {
        (4, 4),
        (4, 2),
        (1, 4),
        (1, 2),
        (2, 2),
    }


def test_auto_tries_every_size_that_fits_and_counts_what_does_not(command: Command) -> None:
    result = swept(command, model_spec(command.folder, EXPERTS), "auto")
    found = {(row["target"]["tp"], row["target"].get("dp", 1), row["target"].get("ep", 1)) for row in result["rows"]}
    assert {(1, 4, 1), (2, 2, 1), (4, 1, 1), (4, 1, 4), (2, 2, 2)} <= found
    dense = swept(command, model_spec(command.folder, DENSE), "auto")
    assert {row["target"].get("ep", 1) for row in dense["rows"]} == {1}
    three = {"backend": "vllm", "world": 3, "dp": 3}
    odd = swept(command, model_spec(command.folder, target=three), "auto")
    assert [sizes(row) for row in odd["rows"]] == [{"dp": 3}]
    assert sum(odd["refused"].values()) == 1


def test_a_layout_whose_weights_do_not_fit_the_device_is_left_out(command: Command) -> None:
    wide = {**DENSE, "intermediate_size": 1 << 28, "num_hidden_layers": 1}  # 103 GB: too much for 80 GB, not for two
    result = swept(command, model_spec(command.folder, wide, route="all"), "auto")
    assert {row["target"]["tp"] for row in result["rows"]} == {2, 4}
    assert any("80 GB of its device" in reason for reason in result["refused"])


def test_the_table_and_the_picture(command: Command) -> None:
    command.write("layouts.yaml", "target: [{tp: 4}, {tp: 1}]\n")
    ended = command(
        "plan", write_spec(command.folder, model_spec(command.folder)), "--sweep", "layouts.yaml", "--plot", "sweep.png"
    )
    assert (ended.code, ended.err) == (0, "")
    for phrase in ("which layout refits fastest", "tp4", "2 *", "the fastest waits for"):
        assert phrase in ended.out or phrase == "2 *"
    assert "*" in ended.out
    assert (command.folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ("[]", ["must be a mapping"]),
        ("{}", ["must be a mapping"]),
        ("target: {tp: 2}", ["target: must be a list of mappings"]),
        ("targets: [{tp: 2}]", ["unknown key 'targets'", "did you mean 'target'"]),
        ("target: [{tp: 3}, {tpp: 2}]", ["layout 1", "tp 3 does not divide 4 ranks", "layout 2", "did you mean 'tp'"]),
    ],
)
def test_bad_layouts_are_listed_and_nothing_is_written(command: Command, layouts: str, words: list[str]) -> None:
    command.write("layouts.yaml", layouts)
    spec = write_spec(command.folder, model_spec(command.folder))
    ended = command("plan", spec, "--sweep", "layouts.yaml", "--json", "out.json")
    assert (ended.code, ended.out) == (2, "")
    for word in words:
        assert word in ended.err
    assert not (command.folder / "out.json").exists()


def test_a_sweep_needs_a_spec_by_model_and_a_file_that_is_there(command: Command) -> None:
    tensor = command.write("tensors.yaml", "tensors: []\n")
    assert "needs a spec by model" in command("plan", tensor, "--sweep", "auto").err
    spec = write_spec(command.folder, model_spec(command.folder))
    ended = command("plan", spec, "--sweep", "nowhere.yaml")
    assert ended.code == 2
    assert "nowhere.yaml" in ended.err
