"""Refit specs by model: both sides laid out, every fault in one message, and what `plan` and `verify` make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from equipment.command import Command
from equipment.model_specs import DENSE, EXPERTS, model_spec, write_spec

from nemo_rl_reshard.cli.refit_spec import held_bytes
from nemo_rl_reshard.cli.spec import parse_spec, read_spec
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.params.routing import RouteKind


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def faults_of(folder: Path, **changed: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_spec(model_spec(folder, **changed), folder=folder)
    return str(caught.value).split("\n  - ")[1:]


def test_trainers_come_first_and_a_preset_groups_each_side(tmp_path: Path) -> None:
    spec = parse_spec(model_spec(tmp_path), folder=tmp_path)
    assert (spec.source.ranks, spec.target.ranks) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert spec.topology.domains == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert list(spec.source.specs) == list(spec.target.specs)
    assert {spec.dtype for spec in spec.target.specs.values()} == {"bfloat16"}


def test_sizes_that_are_left_out_follow_from_the_world(tmp_path: Path) -> None:
    whole = parse_spec(model_spec(tmp_path), folder=tmp_path)
    short = parse_spec(
        model_spec(
            tmp_path, source={"backend": "fsdp2", "world": 4, "tp": 2}, target={"backend": "vllm", "world": 4, "tp": 2}
        ),
        folder=tmp_path,
    )
    assert short.described == whole.described
    assert whole.described is not None
    assert whole.described.source == "fsdp2 dp_shard2 tp2 on 4 ranks"
    assert whole.described.target == "vllm tp2 dp2 on 4 ranks"


def test_each_backend_shares_the_model_out_as_its_sizes_say(tmp_path: Path) -> None:
    """B06: an axis that replicates must not be taken for one that shards."""
    total = sum(spec.nbytes for spec in parse_spec(model_spec(tmp_path), folder=tmp_path).target.specs.values())
    fsdp2 = parse_spec(model_spec(tmp_path, source={"backend": "fsdp2", "world": 4, "dp_shard": 4}), folder=tmp_path)
    assert sum(held_bytes(fsdp2.source).values()) == total
    hsdp = {"backend": "fsdp2", "world": 4, "dp_replicate": 2, "dp_shard": 2}
    assert sum(held_bytes(parse_spec(model_spec(tmp_path, source=hsdp), folder=tmp_path).source).values()) == 2 * total
    stages = {"backend": "megatron", "world": 2, "pp": 2, "stages": [1, 2]}
    staged = parse_spec(model_spec(tmp_path, source=stages), folder=tmp_path)
    first, last = ({name for name, layout in staged.source.layouts.items() if rank in layout.ranks} for rank in (0, 1))
    assert not first & last
    assert {"model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"} <= first
    assert {"model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight", "lm_head.weight"} <= last


def test_experts_go_direct_one_by_one_and_attention_only_by_route_all(tmp_path: Path) -> None:
    target = {"backend": "vllm", "world": 4, "tp": 2, "dp": 2, "ep": 4}
    spec = parse_spec(model_spec(tmp_path, EXPERTS, target=target), folder=tmp_path)
    expert, query = "model.layers.2.mlp.experts.7.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    assert spec.routes[expert].kind is RouteKind.DIRECT
    assert spec.routes[query].kind is RouteKind.LEFTOVER
    assert len(spec.target.layouts[expert].ranks) == 1
    everything = parse_spec(model_spec(tmp_path, EXPERTS, target=target, route="all"), folder=tmp_path)
    assert everything.routes[query].kind is RouteKind.DIRECT


def test_every_fault_is_in_one_message(tmp_path: Path) -> None:
    faults = faults_of(
        tmp_path,
        model={"preset": "qwen3-4"},
        source={"backend": "megatro", "world": 4, "tp": 2},
        target={"backend": "vllm", "world": 4, "tp": 3, "dp": 2},
        topology={"preset": "dgx-h10", "ranks_per_nic": 0},
        rout="all",
        bucket_bytes="big",
    )
    wanted = (
        ["unknown key 'rout'", "did you mean 'route'"],
        ["model", "'qwen3-4'", "'qwen3-4b'"],
        ["source.backend", "did you mean 'megatron'"],
        ["target.world", "tp 3 x dp 2 = 6 does not make 4 ranks"],
        ["topology.preset", "did you mean 'dgx-h100'"],
        ["topology.ranks_per_nic", "1 or more"],
        ["bucket_bytes", "'big'"],
    )
    assert len(faults) == len(wanted)
    for words in wanted:
        assert any(all(word in fault for word in words) for fault in faults), words


SIDE_FAULTS: list[tuple[str, Any, list[str]]] = [
    ("source", None, ["source", "missing"]),
    ("source", 4, ["source", "must be a mapping"]),
    ("source", {"world": 4}, ["source.backend", "missing; give megatron or fsdp2"]),
    ("source", {"backend": "fsdp2"}, ["source.world", "missing"]),
    ("source", {"backend": "fsdp2", "world": 4, "pp": 2}, ["source", "unknown key 'pp'"]),
    ("source", {"backend": "fsdp2", "world": 4, "dpshard": 4}, ["source", "did you mean 'dp_shard'"]),
    ("source", {"backend": "fsdp2", "world": 4, "tp": 3}, ["source.world", "tp 3 does not divide 4 ranks"]),
    ("source", {"backend": "megatron", "world": 0}, ["source.world", "0 is not a whole number between 1 and 65536"]),
    ("source", {"backend": "megatron", "world": 1 << 20}, ["source.world", "between 1 and 65536"]),
    ("source", {"backend": "megatron", "world": 4, "tp": True}, ["source.tp", "True"]),
    ("source", {"backend": "megatron", "world": 2, "pp": 2, "stages": "1,2"}, ["source.stages", "layers of each"]),
    ("source", {"backend": "megatron", "world": 2, "pp": 2, "stages": [1, 1]}, ["source", "stages"]),
    ("target", {"backend": "vllm", "world": 4, "dp_shard": 4}, ["target", "unknown key 'dp_shard'"]),
    ("target", {"backend": "vllm", "world": 3, "tp": 3}, ["target", "3"]),
    ("target", {"backend": "vllm", "world": 4, "tp": 2, "ep": 4}, ["target", "ep"]),
    ("model", {}, ["model"]),
    ("model", 3, ["model"]),
    ("model", {"hf_config": "nowhere.json"}, ["model", "nowhere.json"]),
]


@pytest.mark.parametrize(("key", "value", "words"), SIDE_FAULTS)
def test_a_fault_of_a_side_names_the_field(tmp_path: Path, key: str, value: Any, words: list[str]) -> None:
    faults = faults_of(tmp_path, **{key: value})
    assert any(all(word in fault for word in words) for fault in faults), faults


def test_both_sides_faults_against_the_model_are_listed_together(tmp_path: Path) -> None:
    faults = faults_of(
        tmp_path,
        source={"backend": "megatron", "world": 8, "pp": 8},
        target={"backend": "vllm", "world": 3, "tp": 3},
    )
    assert any(fault.startswith("source") for fault in faults)
    assert any(fault.startswith("target") for fault in faults)


def test_plan_prints_the_model_the_sides_and_leftovers_by_reason(command: Command) -> None:
    spec = write_spec(command.folder, model_spec(command.folder, EXPERTS))
    ended = command("plan", spec, "--json", "plan.json")
    assert (ended.code, ended.err) == (0, "")
    text = " ".join(ended.out.split())
    for phrase in (
        "fsdp2 dp_shard2 tp2 on 4 ranks -> vllm tp2 dp2 on 4 ranks",
        "4 trainers, 4 inference ranks",
        "% of the floor",
    ):
        assert phrase in text
    assert "model.layers.2.self_attn.k_proj.weight" not in text  # 26 leftovers are summed up by reason
    assert "attention" in text
    plan = json.loads((command.folder / "plan.json").read_text())
    assert {"schema", "digest", "totals", "per_rank", "balance", "predicted", "leftovers"} <= plan.keys()
    assert plan["totals"]["unique_bytes"] == sum(spec.nbytes for spec in read_spec(spec).target.specs.values())
    assert [row["rank"] for row in plan["per_rank"]] == list(range(8))


def test_one_spec_gives_the_same_json_bytes_again(command: Command) -> None:
    spec = write_spec(command.folder, model_spec(command.folder, EXPERTS, route="all"))
    for out in ("first.json", "second.json"):
        assert command("plan", spec, "--json", out).code == 0
    assert (command.folder / "first.json").read_bytes() == (command.folder / "second.json").read_bytes()


def test_a_spec_by_model_that_fits_this_machine_is_verified_for_real(command: Command) -> None:
    """KV heads and experts of both sides are what a real refit writes, not only what a plan counts."""
    spec = write_spec(command.folder, model_spec(command.folder, EXPERTS, route="all"))
    ended = command("verify", spec)
    assert (ended.code, ended.err) == (0, "")
    assert "PASS" in ended.out


def test_a_spec_by_model_larger_than_this_machine_is_refused_in_one_sentence(command: Command) -> None:
    many = {"backend": "fsdp2", "world": 8192, "dp_shard": 2, "dp_replicate": 4096}
    spec = write_spec(command.folder, model_spec(command.folder, source=many))
    ended = command("verify", spec)
    assert (ended.code, ended.out) == (3, "")
    assert "this spec has 8196 ranks" in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    wide = {**DENSE, "intermediate_size": 1 << 28}
    ended = command("bench", write_spec(command.folder, model_spec(command.folder, wide)))
    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith("memory: the ranks of this spec hold")


def test_the_picture_of_a_plan_is_a_png(command: Command) -> None:
    spec = write_spec(command.folder, model_spec(command.folder))
    assert command("plan", spec, "--plot", "load.png").code == 0
    assert (command.folder / "load.png").read_bytes().startswith(b"\x89PNG")
    assert command("plan", spec, "--plot", "spec.yaml/load.png").code == 2
