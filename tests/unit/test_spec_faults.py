"""Bad refit specs: each kind of mistake is one fault that names tensor, rank and field, and all come at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_reshard.cli.spec import parse_spec, read_spec
from nemo_rl_reshard.errors import ConfigError

GOOD: dict[str, Any] = {
    "tensors": [
        {
            "name": "a.mlp.up_proj.weight",
            "shape": [6, 4],
            "dtype": "float32",
            "source": {"ranks": [[0, 1], [2, 3]], "placements": ["S(0)", "R"]},
            # torch.chunk cuts 4 columns over 3 ranks into 2, 2, 0.
            "target": {"ranks": [4, 5, 6], "placements": ["S(1)"]},
        }
    ]
}
HELD = [
    {"rank": 0, "offset": [0, 0], "extent": [3, 4]},
    {"rank": 1, "offset": [3, 0], "extent": [3, 4]},
]


def faults_of(plain: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_spec(plain)
    return str(caught.value).split("\n  - ")[1:]


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with the value at a dotted path replaced; `tensor.` is the first tensor."""
    plain = copy.deepcopy(GOOD)
    at: Any = plain
    *steps, last = path.split(".")
    for step in steps:
        at = at["tensors"][0] if step == "tensor" else at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return plain


def held(index: int, **fields: Any) -> list[dict[str, Any]]:
    """HELD with fields of one shard replaced."""
    return [shard | (fields if place == index else {}) for place, shard in enumerate(HELD)]


ONE_MISTAKE = [
    ("tensor.dtype", "bf16", ["'a.mlp.up_proj.weight'.dtype", "bfloat16"]),
    ("tensor.dtype", ..., ["dtype", "missing"]),
    ("tensor.shape", [6, -4], ["'a.mlp.up_proj.weight'.shape", "-4"]),
    ("tensor.shape", [6, True], ["shape", "True"]),
    ("tensor.name", "", ["tensors[0].name"]),
    ("tensor.source", ..., ["source: missing"]),
    ("tensor.source.ranks", [[0, 1], [2]], ["source.ranks", "grid"]),
    ("tensor.source.ranks", [[0, 1], [2, 1]], ["source.ranks", "rank 1 is named 2 times"]),
    ("tensor.source.ranks", [[0, 1], [2, "3"]], ["source.ranks", "'3' is not a rank"]),
    ("tensor.source.ranks", [[0, 1], [2, -3]], ["source.ranks", "-3 is not a rank"]),
    ("tensor.source.ranks", [], ["source.ranks"]),
    ("tensor.source.ranks", 0, ["source.ranks"]),
    ("tensor.source.placements", ["S(0)"], ["source.placements", "1 placements for a mesh of 2 axes"]),
    ("tensor.source.placements", ["S(0)", "S(2)"], ["source.placements[1]", "dim 2"]),
    ("tensor.source.placements", ["S(0)", "P"], ["source.placements[1]", "'P'"]),
    ("tensor.source.placements", ["S(-1)", "R"], ["source.placements[0]", "'S(-1)'"]),
    ("tensor.source.placements", ["SS(0,3)", "S(0)"], ["source.placements", "split factor 3"]),
    ("tensor.source.placements", ["SS(0", "2)", "S(0)"], ['write "SS(0,2)" with quotes']),
    ("tensor.source.placement", ["R"], ["unknown key 'placement'", "did you mean 'placements'"]),
    ("tensor.tgt", {}, ["unknown key 'tgt'"]),
    ("tensor.target.ranks", [4, 5, 3], ["rank 3 is on both sides", "a.mlp.up_proj.weight", "colocated"]),
    ("tensor.source", {"shards": HELD[:1]}, ["source: no rank holds [3, 0] + [3, 4]", "target ranks [4, 5]"]),
    ("tensor.source", {"shards": [*HELD, HELD[1] | {"extent": [1, 4]}]}, ["rank 1", "share [3, 0] + [1, 4]"]),
    ("tensor.source", {"shards": held(1, extent=[4, 4])}, ["shards[1]", "rank 1", "outside shape [6, 4]"]),
    ("tensor.source", {"shards": held(1, offset=[3])}, ["shards[1]", "rank 1", "2 dims"]),
    ("tensor.source", {"shards": held(1, rank="one")}, ["shards[1].rank", "'one'"]),
    ("tensor.source", {"shards": held(1, ofset=[3, 0])}, ["shards[1]", "did you mean"]),
    ("tensor.source", {"shards": []}, ["source.shards"]),
    ("tensor.source", {"shards": HELD, "ranks": [0]}, ["one of the two forms"]),
    ("route", "al", ["route", "did you mean 'all'"]),
    ("rout", "all", ["unknown key 'rout'", "did you mean 'route'"]),
    ("colocated", "yes please", ["colocated"]),
    ("topology", {"preset": "dgx-h10"}, ["topology.preset", "did you mean 'dgx-h100'"]),
    ("topology", {"preset": "gb200-nvl72", "domain_size": 73}, ["topology.domain_size", "the 72 ranks that a domain"]),
    ("topology", {"preset": "dgx-h100", "domain_size": 0}, ["topology.domain_size", "1 or more"]),
    ("topology", {"domains": [[0, 1]], "domain_size": 2}, ["topology.domain_size", "not both"]),
    ("topology", {"ranks_per_nic": True}, ["topology.ranks_per_nic", "1 or more"]),
    ("topology", {"rank_per_nic": 2}, ["topology", "did you mean 'ranks_per_nic'"]),
    ("topology", {"domains": [[0, 1], [1, 2]]}, ["topology.domains[1]", "rank 1 is already in domain 0"]),
    ("topology", {"network_gb_per_s": 0}, ["topology.network_gb_per_s"]),
    ("topology", {"fast_gbs_per_s": 1}, ["topology", "did you mean 'fast_gb_per_s'"]),
    ("topology", {"wire_efficiency": 1.5}, ["topology.wire_efficiency"]),
    ("topology", {"network_gb_per_s": 1e-320}, ["topology.network_gb_per_s", "1e-320"]),
    ("topology", {"network_latency_s": 1e308}, ["topology.network_latency_s", "1e+308"]),
    ("tensor.shape", [10**15, 4], ["'a.mlp.up_proj.weight'.shape", "raise bucket_bytes"]),
    ("tensor.name", "a\nb", ["tensors[0].name", "printed"]),
    ("tensor.name", "a\ud800", ["tensors[0].name", "printed"]),
    ("tensor.source.placements", ["SS(0,0)", "R"], ["source.placements[0]", "k from 1"]),
    ("tensor.source.placements", ["SS(0,1000000000)", "R"], ["source.placements[0]"]),
    ("tensor.source.placements", ["S(" + "9" * 5000 + ")", "R"], ["source.placements[0]"]),
    ("bucket_bytes", 0, ["bucket_bytes"]),
    ("bucket_bytes", 1 << 50, ["bucket_bytes", "at most"]),
    ("message_bytes", 1.5, ["message_bytes", "1.5"]),
    ("tensors", [], ["tensors"]),
]


def test_the_good_one_is_good() -> None:
    assert parse_spec(GOOD).target.ranks == (4, 5, 6)


@pytest.mark.parametrize(("path", "value", "phrases"), ONE_MISTAKE, ids=lambda value: str(value)[:40])
def test_one_mistake_is_one_fault(path: str, value: Any, phrases: list[str]) -> None:
    faults = faults_of(changed(path, value))
    assert len(faults) == 1, faults
    for phrase in phrases:
        assert phrase in faults[0]


def test_six_mistakes_in_six_places_are_six_faults() -> None:
    plain = {"tensors": [copy.deepcopy(GOOD["tensors"][0]) | {"name": f"t{index}"} for index in range(5)]}
    tensors = plain["tensors"]
    tensors[0]["dtype"] = "float23"
    tensors[1]["shape"] = "6x4"
    tensors[2]["source"]["placements"] = ["S(0)", "S(7)"]
    tensors[3]["target"]["ranks"] = [4, 5, 0]
    tensors[4]["source"] = {"shards": HELD[1:]}
    plain["topology"] = {"preset": "dgx"}
    faults = faults_of(plain)
    assert len(faults) == 6, faults
    for word in ("'t0'.dtype", "'t1'.shape", "'t2': source", "rank 0 is on both sides", "'t4': source", "topology"):
        assert sum(word in fault for fault in faults) == 1, word


def test_one_faulty_tensor_shows_all_its_own_mistakes() -> None:
    plain = changed("tensor.dtype", "float33")
    plain["tensors"][0]["source"]["placements"] = ["Q", "S(5)"]
    plain["tensors"][0]["target"]["ranks"] = [4, 4, 6]
    assert len(faults_of(plain)) == 4


def test_two_tensors_of_one_name_are_refused() -> None:
    plain = copy.deepcopy(GOOD)
    plain["tensors"] *= 2
    faults = faults_of(plain)
    assert len(faults) == 1
    assert "two tensors" in faults[0]


def test_a_plain_tensor_smaller_than_the_shape_is_not_taken_for_the_whole() -> None:
    """B11: half of the columns offered as if they were all."""
    plain = changed("tensor.source", {"shards": [{"rank": 0, "offset": [0, 0], "extent": [6, 2]}]})
    faults = faults_of(plain)
    assert len(faults) == 1
    assert "no rank holds [0, 2] + [6, 2], which target ranks [5] need" in faults[0]


def test_a_leftover_that_no_rank_can_complete_is_refused_before_it_is_gathered() -> None:
    """Gathering needs all of it, whatever the target needs; each such tensor is a fault of its own."""
    half = {"shards": [{"rank": 0, "offset": [0, 0], "extent": [3, 4]}]}
    need = {"shards": [{"rank": 4, "offset": [0, 0], "extent": [2, 4]}]}
    tensor = {"shape": [6, 4], "dtype": "float32", "source": half, "target": need}
    plain = {"tensors": [{"name": name, **tensor} for name in ("model.norm.weight", "lm_head.weight")]}
    faults = faults_of(plain)
    assert len(faults) == 2
    assert all("no rank holds [3, 0] + [3, 4], and a leftover is gathered whole" in fault for fault in faults)
    assert parse_spec({**plain, "route": "all"}).target.ranks == (4,)


def test_unmerged_lora_names_are_refused() -> None:
    name = "base_model.model.model.layers.0.mlp.down_proj.base_layer.weight"
    faults = faults_of(changed("tensor.name", name))
    assert len(faults) == 1
    assert name in faults[0]


@pytest.mark.parametrize("plain", [None, [], "text", 3])
def test_what_is_no_mapping_is_refused(plain: Any) -> None:
    with pytest.raises(ConfigError, match="must be a mapping"):
        parse_spec(plain)


@pytest.mark.parametrize(
    ("name", "text", "phrase"),
    [
        ("twice.yaml", "route: all\nroute: ffn\ntensors: []\n", "line 2: key 'route' is given twice"),
        ("twice.json", '{"route": "all", "route": "ffn", "tensors": []}', "key 'route' is given twice"),
        ("broken.yaml", "tensors: [\n", "is not YAML"),
        ("broken.json", "{", "is not JSON"),
        ("code.yaml", "tensors: !!python/object/apply:os.getcwd []\n", "is not YAML"),
        ("int.yaml", "tensors: !!int abc\n", "is not YAML"),
        ("no_int.yaml", 'tensors: !!int ""\n', "is not YAML"),
        ("bool.yaml", "tensors: !!bool abc\n", "is not YAML"),
        ("time.yaml", "tensors: !!timestamp abc\n", "is not YAML"),
        ("date.yaml", "tensors: 2024-13-45\n", "is not YAML"),
        ("endless.yaml", "tensors: [{source: {ranks: &again [*again]}}]\n", "is not YAML"),
        ("deep.yaml", "[" * 5000 + "]" * 5000, "is not YAML"),
        ("deep.json", "[" * 100_000 + "]" * 100_000, "is not JSON"),
        ("digits.json", '{"bucket_bytes": ' + "9" * 5000 + "}", "is not JSON"),
        ("huge.json", '{"bucket_bytes": ' + "9" * 400 + "}", "whole number of 1329 bits"),
        ("huge.yaml", "bucket_bytes: 0x" + "f" * 5000 + "\n", "whole number of 20000 bits"),
    ],
)
def test_files_that_cannot_mean_one_thing_are_refused(tmp_path: Path, name: str, text: str, phrase: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    assert phrase in str(caught.value)


def test_an_unquoted_strided_shard_in_a_yaml_file_gets_the_hint(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "tensors:\n  - {name: w, shape: [4, 4], dtype: float32,\n"
        "     source: {ranks: [[0, 1], [2, 3]], placements: [SS(0,2), S(0)]},\n"
        "     target: {ranks: [4], placements: [R]}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    assert 'write "SS(0,2)" with quotes' in str(caught.value)
    path.write_text(path.read_text().replace("[SS(0,2), S(0)]", '["SS(0,2)", S(0)]') + "route: all\n")
    assert read_spec(path).source.ranks == (0, 1, 2, 3)
