"""Loader tracing on small loaders that do what real ones do; the oracle is the same loader run for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import pytest
import torch

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.targets.loader_trace import LoaderTrace, trace_loader

Named = Iterable[tuple[str, torch.Tensor]]
Loader = Callable[[Mapping[str, torch.Tensor], str, torch.Tensor], None]


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype)


def traced(
    rule: Loader,
    specs: list[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str] | None = None,
    optional: Callable[[str], bool] = lambda name: False,
) -> LoaderTrace:
    def load_weights(weights: Named) -> set[str]:
        for name, tensor in weights:
            rule(parameters, name, tensor)
        return set()

    must_cover = [name for name, tensor in parameters.items() if tensor.is_floating_point()]
    return trace_loader(load_weights, specs, parameters, aliases or {}, must_cover, optional)


def coded(spec: TensorSpec) -> torch.Tensor:
    return torch.arange(1, spec.numel + 1, dtype=getattr(torch, spec.dtype)).view(spec.shape)


def assert_replays(rule: Loader, specs: list[TensorSpec], shapes: Mapping[str, tuple[int, ...]]) -> LoaderTrace:
    """The places of the trace, written by hand, give what the loader itself gives."""
    live = {name: torch.full(shape, -1.0) for name, shape in shapes.items()}
    before = {name: tensor.clone() for name, tensor in live.items()}
    trace = traced(rule, specs, live)
    assert all(torch.equal(live[name], before[name]) for name in live), "tracing moved bytes"
    replayed = {name: tensor.clone() for name, tensor in before.items()}
    for item in specs:
        rule(live, item.name, coded(item))
        for shard in trace.shards_of(item.name):
            view = replayed[shard.view.storage].as_strided(shard.view.extent, shard.view.stride, shard.view.offset)
            view.copy_(coded(item)[shard.region.slices])
    for name, fills in trace.padding.items():
        for view, value in fills:
            replayed[name].as_strided(view.size, view.stride, view.offset).fill_(value)
    for name in shapes:
        assert torch.equal(replayed[name], live[name]), name
    return trace


def qkv_of_rank(rank: int, head: int = 4) -> Loader:
    """8 query heads and 2 key/value heads over 4 ranks: two query heads each, and key/value head rank // 2."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        fused = parameters["qkv"]
        if name == "q":
            fused[: 2 * head].copy_(tensor.narrow(0, rank * 2 * head, 2 * head))
        else:
            at = (2 if name == "k" else 3) * head
            fused.narrow(0, at, head).copy_(tensor.narrow(0, rank // 2 * head, head))

    return rule


@pytest.mark.parametrize("rank", range(4))
def test_fewer_kv_heads_than_ranks_b30(rank: int) -> None:
    """B30: each rank holds whole key/value heads; pairs of ranks hold the same rows."""
    specs = [spec("q", 32, 3), spec("k", 8, 3), spec("v", 8, 3)]
    trace = assert_replays(qkv_of_rank(rank), specs, {"qkv": (16, 3)})
    (key,) = trace.shards_of("k")
    assert key.region.offset == (4 * (rank // 2), 0)
    assert key.region.extent == (4, 3)
    assert trace.indirect == {}


def test_interleaved_pieces_of_one_tensor_b31() -> None:
    """B31: rows [b0, a0, b1, a1]; rank 1 of 2 takes b1, a1, wherever its loader puts them."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        parameters["ba"][0].copy_(tensor[2])
        parameters["ba"][1].copy_(tensor[3])

    trace = assert_replays(rule, [spec("in_proj_ba", 4, 3)], {"ba": (2, 3)})
    assert [shard.region.offset for shard in trace.shards_of("in_proj_ba")] == [(2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("expert_map", "first"), [([0, 1, 2, -1, -1, -1], "experts.1"), ([0, -1, 1, -1, 2, -1], "experts.2")]
)
def test_experts_follow_the_loader_s_own_map_b25(expert_map: list[int], first: str) -> None:
    """B25: local slot 1 holds expert 1 under linear placement, 2 under round robin; other experts have no shard.

    The map is a buffer of the model, and the loader reads numbers from it.
    """

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        _, number, half = name.split(".")
        slot = int(parameters["expert_map"][int(number)].item())
        if slot >= 0:
            parameters["w13"][slot].narrow(0, {"gate": 0, "up": 2}[half], 2).copy_(tensor)

    specs = [spec(f"experts.{e}.{half}", 2, 3) for e in range(6) for half in ("gate", "up")]
    parameters = {"w13": torch.zeros(3, 4, 3), "expert_map": torch.tensor(expert_map)}
    trace = traced(rule, specs, parameters)
    assert trace.indirect == {}
    in_slot_1 = {name for name, (shard,) in trace.places.items() if shard.view.offset in (12, 18)}
    assert in_slot_1 == {f"{first}.gate", f"{first}.up"}
    assert len(trace.places) == 6
    assert len(trace.ignored) == 6


def test_transposed_and_converted_copies_are_followed() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        turned = tensor.t().contiguous().to(torch.float64).narrow(0, 1, 2)
        parameters["w"].copy_(turned)

    trace = assert_replays(rule, [spec("w_in", 5, 3)], {"w": (2, 5)})
    (shard,) = trace.shards_of("w_in")
    assert (shard.region.offset, shard.region.extent) == ((0, 1), (5, 2))
    assert shard.view.stride == (1, 5)


def test_a_copy_through_a_temporary_is_followed() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        held = torch.empty(tensor.shape)
        held.copy_(tensor)
        parameters["w"].copy_(held[1:])

    assert_replays(rule, [spec("t", 3, 2)], {"w": (2, 2)})


def test_vocabulary_padding_is_seen_b35() -> None:
    """B35: 101 rows over 2 ranks of 64; rank 1 takes rows 64 to 100 and fills 27 rows with zero."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        assert tensor.shape[0] == 101
        parameters["embed"][:37].copy_(tensor.narrow(0, 64, 37))
        parameters["embed"][37:].fill_(0)

    trace = assert_replays(rule, [spec("embed_tokens", 101, 2)], {"embed": (64, 2)})
    assert trace.partial == {"embed"}
    assert [(view.offset, view.size, value) for view, value in trace.padding["embed"]] == [(74, (27, 2), 0.0)]
    with pytest.raises(TargetError, match="embed_tokens: refused by the loader"):
        traced(rule, [spec("embed_tokens", 104, 2)], {"embed": torch.zeros(64, 2)})


def test_computed_parameters_go_whole_and_together() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        if name == "A_log":
            parameters["A"].copy_(tensor[:2])
            parameters["A"].copy_(-torch.exp(parameters["A"]))
        elif name == "norm":
            parameters["norm"].copy_(tensor + 1)
        elif name == "D":
            parameters["D"].copy_(tensor)

    parameters = {"A": torch.zeros(2), "norm": torch.zeros(4), "D": torch.zeros(3)}
    trace = traced(rule, [spec("A_log", 4), spec("norm", 4), spec("D", 3)], parameters)
    assert set(trace.indirect) == {"A_log", "norm"}
    assert "computed by the loader" in trace.indirect["norm"]
    assert trace.shards_of("A_log") == ()
    assert len(trace.shards_of("D")) == 1


def test_concatenated_tensors_are_one_group() -> None:
    kept: list[torch.Tensor] = []

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        kept.append(tensor)
        if len(kept) == 2:
            parameters["w"].copy_(torch.cat(kept))

    trace = traced(rule, [spec("a", 2, 3), spec("b", 1, 3)], {"w": torch.zeros(3, 3)})
    assert trace.groups == (frozenset({"a", "b"}),)
    assert all("concatenated" in reason for reason in trace.indirect.values())


def test_scales_that_pass_through_python_are_indirect() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        if name == "scale":
            parameters["scale"].fill_(tensor.item())
        else:
            parameters["w"].copy_(tensor)

    trace = traced(rule, [spec("scale", 1), spec("w", 2, 2)], {"scale": torch.zeros(1), "w": torch.zeros(2, 2)})
    assert "Python number" in trace.indirect["scale"]
    assert "w" not in trace.indirect


def test_the_receiver_decides_the_dtype_b37() -> None:
    """B37: a router bias stays float32 in a bfloat16 engine; buffers count as destinations too (B53)."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        parameters[name].copy_(tensor)

    parameters = {"gate.bias": torch.zeros(2), "w": torch.zeros(2, 2, dtype=torch.bfloat16)}
    trace = traced(rule, [spec("gate.bias", 2, dtype="bfloat16"), spec("w", 2, 2)], parameters)
    assert trace.dtypes == {"gate.bias": "float32", "w": "bfloat16"}


def test_a_quantised_parameter_is_refused_by_name_b55() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        parameters["w"].copy_(tensor)

    with pytest.raises(TargetError, match="gate_proj: lands in a parameter of dtype float8_e4m3fn"):
        traced(rule, [spec("gate_proj", 2, 2)], {"w": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)})


def by_name(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    parameters[name].copy_(tensor)


def test_one_error_lists_refused_tensors_and_unfilled_parameters_b22() -> None:
    """B22: names that the loader does not know and parameters that nothing fills come in one error."""
    parameters = {"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(2)}
    with pytest.raises(TargetError) as caught:
        traced(by_name, [spec("a", 2), spec("visual.b", 3), spec("visual.c", 2)], parameters)
    text = str(caught.value)
    assert "visual.b: refused by the loader: KeyError" in text
    assert "visual.c: refused by the loader: KeyError" in text
    assert "parameter b: 3 of 3 elements are filled by no tensor" in text
    assert "parameter c: 2 of 2" in text
    assert "parameter a" not in text


def test_nothing_loaded_is_an_error_b54() -> None:
    """B54: a prefix with a typo loads nothing."""
    with pytest.raises(TargetError, match="the loader takes none of the 2 tensors"):
        traced(by_name, [spec("modle.a", 2), spec("modle.b", 3)], {"a": torch.zeros(2), "b": torch.zeros(3)})


def test_draft_tensors_may_be_refused_b17() -> None:
    """B17: without a drafter the loader refuses `mtp.*`; they are left out and listed."""
    trace = traced(
        by_name, [spec("a", 2), spec("mtp.x", 4)], {"a": torch.zeros(2)}, optional=lambda n: n.startswith("mtp.")
    )
    assert list(trace.skipped) == ["mtp.x"]
    assert "mtp.x" not in trace.places


def test_a_partly_filled_parameter_is_an_error() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        parameters["w"][:2].copy_(tensor)

    with pytest.raises(TargetError, match="parameter w: 3 of 9 elements"):
        traced(rule, [spec("t", 2, 3)], {"w": torch.zeros(3, 3)})


def test_two_tensors_for_one_parameter_are_refused_b33() -> None:
    """B33: a head and an embedding that share a parameter by copying over each other."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        parameters["embed"].copy_(tensor)

    with pytest.raises(TargetError, match=r"embed_tokens and lm_head claim the same elements"):
        traced(rule, [spec("embed_tokens", 3, 2), spec("lm_head", 3, 2)], {"embed": torch.zeros(3, 2)})


def test_a_tied_tensor_is_compared_not_dropped_b34() -> None:
    """B34: the loader skips the head of a tied model; it is declared indirect, with the parameter it shares."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        if name == "embed.weight":
            parameters["embed.weight"].copy_(tensor)

    trace = traced(
        rule,
        [spec("embed.weight", 3, 2), spec("head.weight", 3, 2)],
        {"embed.weight": torch.zeros(3, 2)},
        aliases={"head.weight": "embed.weight"},
    )
    assert trace.tied == {"head.weight": "embed.weight"}
    assert "tied" in trace.indirect["head.weight"]
    assert trace.feeds["head.weight"] == {"embed.weight"}


def test_values_from_nowhere_are_refused() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        parameters["w"].copy_(torch.rand(4))

    with pytest.raises(TargetError, match="values that come from no checkpoint tensor"):
        traced(rule, [spec("t", 4)], {"w": torch.zeros(4)})


def padded_vocabulary(rank: int, rows: int = 4) -> Loader:
    """As vLLM cuts a vocabulary: rows past its end are set to zero, and a rank may hold nothing else."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        first = min(rank * rows, len(tensor))
        part = tensor.narrow(0, first, min(rows, len(tensor) - first))
        parameters[name][: len(part)].copy_(part)
        parameters[name][len(part) :].fill_(0)

    return rule


@pytest.mark.parametrize(("rank", "real"), [(0, 4), (1, 2), (2, 0)])
def test_a_rank_that_holds_only_padding_of_a_vocabulary_needs_nothing_of_it_b34(rank: int, real: int) -> None:
    """6 rows over 3 ranks of 4: the last rank copies no element, and must not wait for any."""
    trace = assert_replays(padded_vocabulary(rank), [spec("embed", 6, 3)], {"embed": (4, 3)})
    assert trace.indirect == {}
    assert [shard.region.extent for shard in trace.shards_of("embed")] == ([(real, 3)] if real else [])
    assert trace.ignored == (() if real else ("embed",))


def test_a_tensor_that_lands_in_two_parameters_is_left_to_the_loader() -> None:
    """A rank may need a region once only; whole or in part, the second place is the loader's business."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        parameters["embed"].copy_(tensor)
        parameters["draft_embed"].copy_(tensor[1:])

    parameters = {"embed": torch.zeros(4, 3), "draft_embed": torch.zeros(3, 3)}
    trace = traced(rule, [spec("embed", 4, 3)], parameters)
    assert trace.indirect == {"embed": "elements of it land in several places (draft_embed, embed)"}
    assert trace.shards_of("embed") == ()
    assert trace.feeds["embed"] == {"embed", "draft_embed"}


@pytest.mark.parametrize("part", [slice(None), slice(1, 2)], ids=["whole", "part"])
def test_a_loader_that_changes_a_tensor_before_it_copies_it_is_computing(part: slice) -> None:
    """Norms that keep weight - 1, scales folded in place: what is copied is no longer what the trainer sent."""

    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        tensor[part].add_(1)
        parameters[name].copy_(tensor)

    trace = traced(rule, [spec("norm", 3)], {"norm": torch.zeros(3)})
    assert "it is computed by the loader (aten.add_" in trace.indirect["norm"]
    assert trace.shards_of("norm") == ()
    assert trace.computed == {"norm"}


def test_a_loader_that_turns_a_tensor_round_in_place_is_computing() -> None:
    def rule(parameters: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
        tensor.copy_(tensor.flip(0))
        parameters[name].copy_(tensor)

    trace = traced(rule, [spec("norm", 3)], {"norm": torch.zeros(3)})
    assert trace.shards_of("norm") == ()
    assert trace.indirect.keys() == {"norm"}
    assert trace.computed == {"norm"}
