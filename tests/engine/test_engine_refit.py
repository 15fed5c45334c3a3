"""Refits of real vLLM engines: afterwards an engine equals one freshly started from the same weights, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nemo_rl_reshard.params.manifest import Manifest

pytest.importorskip("vllm", exc_type=ImportError)

# The first test of a group waits for the whole group.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Findings = Callable[..., dict[str, Any]]

LIVE_ONE_RANK = (
    "dense:float32:tp1:live",
    "dense:bfloat16:tp1:live",
    "tied:float32:tp1:live",
    "moe:float32:tp1:live",
    "moe:bfloat16:tp1:live",
    "shared:float32:tp1:live",
    "dense:float32:tp1:packed",
    "moe:float32:tp1:packed",
)
PACKED_ONE_RANK = (
    "dense:float32:tp1:auto",
    "dense:bfloat16:tp1:auto",
    "tied:float32:tp1:auto",
    "tied:bfloat16:tp1:auto",
    "moe:float32:tp1:auto",
    "moe:bfloat16:tp1:auto",
    "moe_padded:float32:tp1:auto",
    "moe_padded:bfloat16:tp1:auto",
    "moe_pair:bfloat16:tp1:auto",
    "shared:bfloat16:tp1:auto",
)
LIVE_TWO_RANKS = ("dense:float32:tp2:live", "tied:float32:tp2:live", "moe:float32:tp2ep:live")
PACKED_TWO_RANKS = ("tied:float32:tp2:auto", "moe:bfloat16:tp2:auto", "moe:float32:tp2ep:auto")

GROUPS = {
    "live": [LIVE_ONE_RANK, LIVE_TWO_RANKS],
    "packed": [PACKED_ONE_RANK, PACKED_TWO_RANKS],
}
CASES = [
    pytest.param(group, engines == "live", name, id=f"{engines}-{name}")
    for engines, groups in GROUPS.items()
    for group in groups
    for name in group
]


@pytest.mark.parametrize(("group", "live", "name"), CASES)
def test_two_refits_equal_fresh_engines(findings: Findings, group: tuple[str, ...], live: bool, name: str) -> None:
    """B18, B30, B34, B35, B45, B48, B49: parameters bit-equal, greedy tokens equal, nothing moved, twice."""
    found = findings(group, live, name)
    fresh = [engine["fresh"] for engine in found["engines"]]
    assert fresh[0]["tokens"] != fresh[1]["tokens"], "the two seeds must be told apart by what they generate"
    for engine in found["engines"]:
        assert engine["after_trace"] == engine["fresh"], "tracing and probing must leave no mark"
        for version, refit in enumerate(engine["refits"], start=1):
            wanted = fresh[refit["seed"]]
            assert refit["parameters"] == wanted["parameters"]
            assert refit["tokens"] == wanted["tokens"]
            assert {done["version"] for done in refit["done"]} == {version}
        assert engine["addresses_kept"]


@pytest.mark.parametrize(("group", "live", "name"), CASES)
def test_everything_is_direct_and_written_as_asked(
    findings: Findings, group: tuple[str, ...], live: bool, name: str
) -> None:
    found = findings(group, live, name)
    mode = name.rpartition(":")[2]
    for engine in found["engines"]:
        for rank in engine["declared"]:
            # An AMX kernel makes a bfloat16 bias float32; then only the loader knows what belongs there.
            assert all(
                tensor.endswith(".bias") and "was converted to torch.float32 after loading" in reason
                for tensor, reason in rank["manifest"]["indirect"]
            )
            modes = {layer: how for layer, (how, _) in rank["modes"].items()}
            norms = {how for layer, how in modes.items() if layer.endswith("norm")}
            others = {how for layer, how in modes.items() if not layer.endswith("norm")}
            assert norms == {"live"}
            assert others == ({"live"} if mode == "live" else {"packed"})


@pytest.mark.parametrize("family", ["moe", "moe_padded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_report_names_the_moe_kernel_b78(findings: Findings, family: str, dtype: str) -> None:
    """B78: sizes that the kernel takes as they are, and sizes that it pads; which kernel it was is in the reason."""
    found = findings(PACKED_ONE_RANK, False, f"{family}:{dtype}:tp1:auto")
    (rank,) = found["engines"][0]["declared"]
    reasons = {reason for layer, (_, reason) in rank["modes"].items() if layer.endswith("routed_experts")}
    assert len(reasons) == 1
    reason = reasons.pop()
    assert reason.startswith(("CPUUnquantizedExperts(vec): ", "X86CPUUnquantizedExperts(amx): "))
    expected = "w13_weight has shape [2, 64, 64] after loading and [2, 16, 64] before"
    assert (expected if family == "moe_padded" else "rearranges w13_weight, w2_weight") in reason


def test_experts_of_the_other_rank_are_not_declared_b25(findings: Findings) -> None:
    """B25: under expert parallelism a rank declares its own experts whole, read from its own expert map."""
    found = findings(LIVE_TWO_RANKS, True, "moe:float32:tp2ep:live")
    for rank, declared in enumerate(found["engines"][0]["declared"]):
        experts = {
            int(name.split(".")[5]): (tuple(offset), tuple(extent))
            for name, offset, extent, *_ in declared["manifest"]["shards"]
            if name.startswith("model.layers.1.mlp.experts.") and name.endswith("gate_proj.weight")
        }
        assert experts == dict.fromkeys(range(4 * rank, 4 * rank + 4), ((0, 0), (32, 64)))


def test_key_value_heads_are_replicated_whole_b30(findings: Findings) -> None:
    """B30: one key/value head over two ranks; both declare all of its rows."""
    found = findings(LIVE_TWO_RANKS, True, "tied:float32:tp2:live")
    for declared in found["engines"][0]["declared"]:
        shards = {name: (offset, extent) for name, offset, extent, *_ in declared["manifest"]["shards"]}
        assert shards["model.layers.0.self_attn.k_proj.weight"] == ([0, 0], [32, 64])


def test_vocabulary_padding_is_never_declared_b35(findings: Findings) -> None:
    """B35: 500 rows over two ranks that hold 256 each; rank 1 declares 244."""
    found = findings(LIVE_TWO_RANKS, True, "dense:float32:tp2:live")
    rows = []
    for declared in found["engines"][0]["declared"]:
        (shard,) = [s for s in declared["manifest"]["shards"] if s[0] == "model.embed_tokens.weight"]
        rows.append((shard[1][0], shard[2][0]))
    assert rows == [(0, 256), (256, 244)]


@pytest.mark.parametrize(("group", "live", "name"), CASES)
def test_manifests_are_plain_values_b70(findings: Findings, group: tuple[str, ...], live: bool, name: str) -> None:
    """B70: what a worker answers is JSON and means the same when read back."""
    for engine in findings(group, live, name)["engines"]:
        for rank, declared in enumerate(engine["declared"]):
            manifest = Manifest.from_plain(declared["manifest"])
            assert manifest.rank == rank
            assert manifest.to_plain() == declared["manifest"]


def test_extra_memory_is_a_layer_not_a_model(findings: Findings) -> None:
    """Packed mode opens a layer at a time; in place nothing is held twice."""
    live = findings(LIVE_ONE_RANK, True, "moe:float32:tp1:live")
    packed = findings(PACKED_ONE_RANK, False, "moe:float32:tp1:auto")
    largest_layer = 8 * 3 * 32 * 64 * 4
    assert [done["peak_extra_bytes"] for refit in live["engines"][0]["refits"] for done in refit["done"]] == [0, 0]
    first_refit = packed["engines"][0]["refits"][0]["done"][0]["peak_extra_bytes"]
    assert 0 < first_refit <= 2 * largest_layer
