"""`verify` through the command: PASS, every mismatch with exit 1, bad input, and what happens to a stale target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from equipment.command import Command

from nemo_rl_reshard.cli.explicit_rank import LiveRank

SPEC = """
tensors:
  - name: model.layers.0.mlp.down_proj.weight
    shape: [7, 5]
    dtype: bfloat16
    source: {ranks: [[0, 1, 2], [3, 4, 5]], placements: ["SS(0,3)", S(0)]}
    target: {ranks: [[6, 7], [8, 9]], placements: [R, S(1)]}
  - name: model.norm.weight
    shape: [5]
    dtype: float32
    source: {ranks: [[0, 1, 2], [3, 4, 5]], placements: [S(0), R]}
    target: {ranks: [6, 7, 8, 9], placements: [R]}
topology: {domains: [[6, 7, 8, 9]]}
"""


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


@pytest.mark.parametrize("route", ["ffn", "all"])
def test_passes_uneven_strided_shards_an_empty_rank_and_a_leftover(command: Command, route: str) -> None:
    ended = command("verify", command.write("spec.yaml", f"{SPEC}route: {route}\n"), "--json", "verify.json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("PASS")
    found = json.loads((command.folder / "verify.json").read_text())
    # Two refits; rank 6 and its replica need 7 x 3 elements, the other two 7 x 2, and each the whole norm.
    assert found["elements_compared"] == 2 * (2 * 21 + 2 * 14 + 4 * 5)
    assert found["passed"]


def test_a_target_left_with_other_values_fails_with_exit_1(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers are filled for the first round in both: what the second refit brings is stale."""
    fill = LiveRank.fill
    monkeypatch.setattr(LiveRank, "fill", lambda self, turn: fill(self, 1))
    ended = command("verify", command.write("spec.yaml", SPEC), "--json", "verify.json")
    assert ended.code == 1
    assert "FAIL" in ended.out
    assert "model.layers.0.mlp.down_proj.weight" in ended.out
    assert not json.loads((command.folder / "verify.json").read_text())["passed"]


def test_bad_input_exits_2_and_runs_nothing(command: Command) -> None:
    ended = command("verify", command.write("spec.yaml", SPEC.replace("S(1)", "S(2)")), "--json", "verify.json")
    assert ended.code == 2
    assert len(ended.faults) == 1
    assert not (command.folder / "verify.json").exists()


def test_a_tensor_that_the_plan_skips_is_nobodys_need(command: Command) -> None:
    """A LoRA adapter is never sent; the tensors beside it are still compared."""
    adapter = SPEC.replace("model.norm.weight", "model.layers.0.mlp.down_proj.lora_A.weight")
    ended = command("verify", command.write("spec.yaml", adapter), "--json", "verify.json")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads((command.folder / "verify.json").read_text())["elements_compared"] == 2 * (2 * 21 + 2 * 14)


@pytest.mark.parametrize("name", ["verify", "bench"])
def test_more_than_the_machine_can_hold_exits_3_and_says_so(command: Command, name: str) -> None:
    ended = command(name, command.write("spec.yaml", SPEC.replace("[7, 5]", "[1000000, 1000000]")))
    assert ended.code == 3
    assert ended.err.startswith("memory: the ranks of this spec hold ")


def test_a_bench_in_which_nothing_travels_exits_2(command: Command) -> None:
    sides = "source: {ranks: [0], placements: [R]}, target: {ranks: [0], placements: [R]}"
    spec = f"colocated: true\nroute: all\ntensors: [{{name: w, shape: [4], dtype: int8, {sides}}}]\n"
    ended = command("bench", command.write("spec.yaml", spec))
    assert ended.code == 2
    assert "no byte travels between ranks" in ended.err
