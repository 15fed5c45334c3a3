"""`plan`: the announcement's two examples through the JSON, stable bytes, exit codes, nothing written on bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from equipment.command import Command

ROWS_TO_COLUMNS = """
tensors:
  - name: model.layers.0.mlp.gate_proj.weight
    shape: [8, 8]
    dtype: float32
    source: {ranks: [0, 1], placements: [S(0)]}
    target: {ranks: [2, 3, 4, 5], placements: [S(1)]}
"""

TP4_TO_TP2_DP2 = """
tensors:
  - name: model.layers.0.mlp.gate_proj.weight
    shape: [8, 8]
    dtype: bfloat16
    source: {ranks: [0, 1, 2, 3], placements: [S(0)]}
    target: {ranks: [[4, 5], [6, 7]], placements: [R, S(0)]}
topology: {domains: [[0], [1], [2], [3], [4, 5, 6, 7]], network_gb_per_s: 50, fast_gb_per_s: 450}
"""


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def planned(command: Command, spec: str, name: str = "spec.yaml") -> dict:
    ended = command("plan", command.write(name, spec), "--json", "plan.json", "--transfers")
    assert (ended.code, ended.err) == (0, "")
    return json.loads((command.folder / "plan.json").read_text())


def test_rows_over_2_to_columns_over_4_is_8_transfers_of_4x2(command: Command) -> None:
    plan = planned(command, ROWS_TO_COLUMNS)
    found = {(row["src"], row["dst"], *row["offset"], *row["extent"], row["link"]) for row in plan["transfers"]}
    assert found == {(src, dst, 4 * src, 2 * (dst - 2), 4, 2, "network") for src in (0, 1) for dst in (2, 3, 4, 5)}
    assert len(plan["transfers"]) == 8
    totals = plan["totals"]
    assert totals["unique_bytes"] == totals["network_bytes"] == totals["network_bytes_floor"] == 8 * 8 * 4
    # All-gather gives each of 2 trainers the half it lacks, then each of 4 ranks takes the whole.
    assert totals["gather_broadcast_bytes"] == 2 * 128 + 4 * 256


def test_tp4_to_tp2_dp2_in_one_domain_brings_each_shard_over_the_network_once(command: Command) -> None:
    plan = planned(command, TP4_TO_TP2_DP2)
    totals, shard = plan["totals"], 2 * 8 * 2
    assert totals["network_bytes"] == totals["network_bytes_floor"] == 4 * shard
    assert totals["fast_bytes"] == 4 * shard
    assert totals["local_bytes"] == 0
    assert [row["network_send"] for row in plan["per_rank"][:4]] == [shard] * 4
    by_link = {link: [row for row in plan["transfers"] if row["link"] == link] for link in ("network", "fast")}
    assert len(by_link["network"]) == len(by_link["fast"]) == 4
    for row in by_link["fast"]:
        brought = [
            other
            for other in by_link["network"]
            if other["dst"] == row["src"] and (other["offset"], other["extent"]) == (row["offset"], row["extent"])
        ]
        assert brought
        assert brought[0]["step"] < row["step"]


def test_a_preset_groups_each_sides_ranks_in_rank_order(command: Command) -> None:
    spec = TP4_TO_TP2_DP2.split("topology:")[0] + "topology: {preset: dgx-h100}\n"
    assert planned(command, spec)["totals"]["network_bytes"] == 8 * 8 * 2
    spread = spec.replace("[[4, 5], [6, 7]]", "[[4, 5, 6, 7, 8], [9, 10, 11, 12, 13]]").replace("[8, 8]", "[10, 8]")
    # Ten target ranks make domains of 8 and 2: rows of the last two, 13 % 5 and 12 % 5, enter the second one again.
    assert planned(command, spread)["totals"]["network_bytes"] == (10 + 4) * 8 * 2


def test_without_a_topology_every_rank_is_its_own_domain(command: Command) -> None:
    totals = planned(command, TP4_TO_TP2_DP2.split("topology:")[0])["totals"]
    assert (totals["network_bytes"], totals["fast_bytes"]) == (2 * 8 * 8 * 2, 0)


def test_route_ffn_leaves_attention_over_and_route_all_does_not(command: Command) -> None:
    spec = ROWS_TO_COLUMNS.replace("mlp.gate_proj", "self_attn.q_proj")
    plan = planned(command, spec)
    assert plan["totals"]["leftover_bytes"] == 256
    assert [row["tensor"] for row in plan["leftovers"]] == ["model.layers.0.self_attn.q_proj.weight"]
    assert plan["leftovers"][0]["reason"]
    assert plan["transfers"] == []
    everything = planned(command, spec + "route: all\n")
    assert everything["leftovers"] == []
    assert everything["totals"]["direct_bytes"] == 256


def test_json_bytes_are_the_same_in_other_processes_whatever_their_hash_seed(command: Command) -> None:
    tensors = "".join(
        f"""
  - name: model.layers.{layer}.mlp.{projection}_proj.weight
    shape: [{7 + layer}, 6]
    dtype: bfloat16
    source: {{ranks: [[0, 1, 2], [3, 4, 5]], placements: ["SS(0,3)", S(0)]}}
    target: {{ranks: [[9, 7], [8, 6]], placements: [R, S({layer % 2})]}}"""
        for layer in range(3)
        for projection in ("gate", "up")
    )
    spec = command.write("spec.yaml", f"tensors:{tensors}\ntopology: {{domains: [[6, 7, 8, 9]]}}\n")
    texts = []
    for seed in ("0", "1", "4711"):
        out = command.folder / f"plan{seed}.json"
        subprocess.run(
            [sys.executable, "-m", "nemo_rl_reshard.cli.app", "plan", spec, "--transfers", "--json", out],
            check=True,
            capture_output=True,
            timeout=60,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
        )
        texts.append(out.read_bytes())
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].endswith(b"\n")


def test_json_and_yaml_of_one_spec_give_one_digest(command: Command) -> None:
    import yaml

    as_json = json.dumps(yaml.safe_load(TP4_TO_TP2_DP2))
    digests = {planned(command, TP4_TO_TP2_DP2)["digest"], planned(command, as_json, "spec.json")["digest"]}
    assert len(digests) == 1


def test_bad_input_exits_2_and_writes_nothing(command: Command) -> None:
    spec = command.write("spec.yaml", ROWS_TO_COLUMNS.replace("float32", "flaot32"))
    ended = command("plan", spec, "--json", "plan.json")
    assert ended.code == 2
    assert len(ended.faults) == 1
    assert "'model.layers.0.mlp.gate_proj.weight'.dtype" in ended.faults[0]
    assert "float32" in ended.faults[0]
    assert [path.name for path in command.folder.iterdir()] == ["spec.yaml"]
    assert ended.out == ""


def test_a_missing_file_and_a_wrong_option_exit_2(command: Command) -> None:
    assert command("plan", "nowhere.yaml").code == 2
    assert command("plan", command.write("spec.yaml", ROWS_TO_COLUMNS), "--jsn", "x").code == 2
    unwritable = command("plan", command.write("spec.yaml", ROWS_TO_COLUMNS), "--json", "no/such/folder.json")
    assert unwritable.code == 2
    assert "no/such/folder.json" in unwritable.err


@pytest.mark.parametrize("out", ["", ".", "folder", "absent/plan.json", "spec.yaml/plan.json", "/dev/null", "n" * 300])
def test_a_json_path_that_cannot_be_written_is_said_before_the_work(command: Command, out: str) -> None:
    (command.folder / "folder").mkdir()
    before = {*command.folder.iterdir(), command.write("spec.yaml", ROWS_TO_COLUMNS)}
    ended = command("plan", "spec.yaml", "--json", out)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("--json ")
    assert set(command.folder.iterdir()) == before


def test_json_written_through_a_link_leaves_the_link(command: Command) -> None:
    (command.folder / "link.json").symlink_to("real.json")
    assert command("plan", command.write("spec.yaml", ROWS_TO_COLUMNS), "--json", "link.json").code == 0
    assert (command.folder / "link.json").is_symlink()
    assert json.loads((command.folder / "real.json").read_text())["schema"] == 1


@pytest.mark.parametrize("route", ["ffn", "all"])
def test_names_with_brackets_are_printed_as_they_are(command: Command, route: str) -> None:
    """A table cell is no markup: `[/b]` would be a closing tag, and `[red]` would vanish."""
    spec = ROWS_TO_COLUMNS.replace("model.layers.0.mlp.gate_proj.weight", '"[red]w[/b]"') + f"route: {route}\n"
    ended = command("plan", command.write("spec.yaml", spec), "--transfers")
    assert (ended.code, ended.err) == (0, "")
    assert "[red]w[/b]" in ended.out


def test_the_table_for_people_names_floor_and_bottleneck(command: Command) -> None:
    out = command("plan", command.write("spec.yaml", TP4_TO_TP2_DP2)).out
    for phrase in ("gather and broadcast would move", "no schedule is faster than", "bottleneck"):
        assert phrase in " ".join(out.split())
