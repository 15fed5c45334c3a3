"""`simulate`: five designs from the same inputs, as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equipment.command import Command
from equipment.model_specs import EXPERTS, model_spec, write_spec

DESIGNS = ["gather_broadcast", "point_to_point", "published", "published_calls_free", "reshard"]


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def simulated(command: Command, plain: dict[str, Any], *more: str) -> dict[str, Any]:
    ended = command("simulate", write_spec(command.folder, plain), "--json", "out.json", *more)
    assert (ended.code, ended.err) == (0, "")
    return json.loads((command.folder / "out.json").read_text())


def wide(folder: Path, **changed: Any) -> dict[str, Any]:
    """Large enough for bytes to matter beside latencies, on links slow enough to make them the bottleneck."""
    model = {**EXPERTS, "hidden_size": 512, "moe_intermediate_size": 512}
    topology = {"preset": "dgx-h100", "domain_size": 2, "network_gb_per_s": 0.01}
    return model_spec(folder, model, topology=topology, route="all", **changed)


def test_all_designs_are_there_and_their_phases_sum_to_their_seconds(command: Command) -> None:
    result = simulated(command, wide(command.folder))
    assert list(result["designs"]) == DESIGNS
    for design in result["designs"].values():
        assert sum(design["phases"].values()) == pytest.approx(design["seconds"], rel=1e-6)
        assert design["over_floor"] == pytest.approx(design["seconds"] / result["floor_seconds"], rel=1e-6)
        assert design["bottleneck"]
        assert all(0 <= busy <= 1 for series in design["timeline"]["series"] for busy in series["busy"])


def test_no_design_is_faster_than_the_floor_and_the_plan_is_the_fastest(command: Command) -> None:
    result = simulated(command, wide(command.folder))
    seconds = {name: design["seconds"] for name, design in result["designs"].items()}
    assert min(seconds.values()) >= result["floor_seconds"]
    assert seconds["reshard"] == min(seconds.values())
    assert seconds["gather_broadcast"] > 1.5 * seconds["reshard"]


def test_twice_the_network_rate_makes_a_refit_that_waits_for_it_about_twice_as_fast(command: Command) -> None:
    slow = wide(command.folder)
    fast = {**slow, "topology": {**slow["topology"], "network_gb_per_s": 0.02}}
    before, after = (simulated(command, plain)["designs"]["reshard"]["phases"]["network"] for plain in (slow, fast))
    assert before / after == pytest.approx(2, rel=0.05)


def test_the_table_names_the_designs_the_floor_and_what_this_plan_waits_for(command: Command) -> None:
    ended = command("simulate", write_spec(command.folder, wide(command.folder)))
    assert (ended.code, ended.err) == (0, "")
    text = " ".join(ended.out.split())
    for phrase in ("gather and", "point to", "published", "x floor", "this plan waits for:"):
        assert phrase in text


def test_one_spec_gives_the_same_bytes_again_and_a_picture(command: Command) -> None:
    spec = write_spec(command.folder, wide(command.folder))
    for out in ("first", "second"):
        assert command("simulate", spec, "--json", f"{out}.json", "--plot", f"{out}.png").code == 0
    assert (command.folder / "first.json").read_bytes() == (command.folder / "second.json").read_bytes()
    assert (command.folder / "first.png").read_bytes().startswith(b"\x89PNG")


def test_a_spec_with_explicit_tensors_is_simulated_too(command: Command) -> None:
    tensor = {
        "name": "model.layers.0.mlp.up_proj.weight",
        "shape": [64, 64],
        "dtype": "bfloat16",
        "source": {"ranks": [0, 1], "placements": ["S(0)"]},
        "target": {"ranks": [2, 3], "placements": ["S(1)"]},
    }
    result = simulated(command, {"tensors": [tensor]}, "--plot", "out.png")
    assert list(result["designs"]) == DESIGNS
    assert result["assumptions"] == []


def test_bad_input_exits_2_and_writes_nothing(command: Command) -> None:
    spec = write_spec(command.folder, model_spec(command.folder, target={"backend": "vlm", "world": 4}))
    before = set(command.folder.iterdir())
    ended = command("simulate", spec, "--json", "out.json", "--plot", "out.png")
    assert (ended.code, ended.out) == (2, "")
    assert "did you mean 'vllm'" in ended.err
    assert set(command.folder.iterdir()) == before
