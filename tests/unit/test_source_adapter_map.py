"""Learning from a live adapter which boxes of a training tensor a checkpoint holds, and refusing to guess."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest
import torch
from equipment.automodel_like import ComputingAdapter, Named, SplitAdapter

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.sources.adapter_map import AdapterMap, Unproven
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.live import NamedTensors
from nemo_rl_reshard.sources.naming import Naming, Piece

PATH = "model.layers.1.mlp.experts"


class _Adapter:
    """An adapter that makes whatever `rule` says."""

    def __init__(self, rule: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._rule = rule

    def convert_single_tensor_to_hf(self, fqn: str, tensor: torch.Tensor, **_: object) -> Named:
        return [(fqn, self._rule(tensor))]


def _shown(piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    """The checkpoint tensor by plain indexing: the oracle of what a piece means."""
    kept = whole[piece.box.slices].permute(*piece.dims, *(d for d in range(whole.ndim) if d not in piece.dims))
    return kept.reshape(piece.shape)


@pytest.mark.parametrize(("leaf", "shape"), [("gate_and_up_projs", (3, 7, 10)), ("down_projs", (3, 5, 7))])
def test_every_element_is_where_the_adapter_puts_it(leaf: str, shape: tuple[int, ...]) -> None:
    """B19: learnt boxes against the adapter's own result on a tensor that counts its elements."""
    learnt = AdapterMap(SplitAdapter()).learn(f"{PATH}.{leaf}", shape, torch.float32)
    counted = torch.arange(torch.Size(shape).numel()).view(shape)
    made = SplitAdapter().made(f"{PATH}.{leaf}", counted)
    assert [piece.name for piece in learnt] == [name for name, _ in made]
    for piece, (_, value) in zip(learnt, made, strict=True):
        assert isinstance(piece, Piece)
        assert piece.indirect == ""
        assert torch.equal(_shown(piece, counted), value)


def test_a_square_expert_is_no_riddle() -> None:
    """B19: with 2 * inter == hidden the shape says nothing of the orientation, and the adapter does."""
    gate, up, *_ = AdapterMap(SplitAdapter(inter=4)).learn(f"{PATH}.gate_and_up_projs", (2, 8, 8), torch.bfloat16)
    assert (gate.box, gate.dims) == (Region((0, 0, 0), (1, 8, 4)), (2, 1))
    assert (up.box, up.dims) == (Region((0, 0, 4), (1, 8, 4)), (2, 1))


def test_large_tensors_are_never_made() -> None:
    """128 experts of 6 GiB in all are learnt without the memory of one of them."""
    adapter = AdapterMap(SplitAdapter(inter=1536))
    adapter.learn(f"{PATH}.gate_and_up_projs", (2, 4096, 3072), torch.float32)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learnt = adapter.learn(f"{PATH}.gate_and_up_projs", (128, 4096, 3072), torch.float32)
    assert len(learnt) == 256
    assert all(isinstance(piece, Piece) for piece in learnt)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 16 * 1024


BOXES = {
    "as it is": lambda t: t,
    "renamed copy": lambda t: t.clone().detach(),
    "last two dims swapped": lambda t: t.transpose(-1, -2).contiguous(),
    "dims turned round": lambda t: t.permute(2, 0, 1).contiguous(),
    "one row": lambda t: t[1, 2],
    "a slice of length one": lambda t: t[:, 1:2],
    "a middle part": lambda t: t[1:, 1:3, 2:5],
    "chunked and unbound": lambda t: t.unbind(0)[1].chunk(2, dim=1)[1],
    "an element": lambda t: t[1, 0, 3],
    "same dtype": lambda t: t.to(torch.float32, copy=True),
    "narrowed by narrow": lambda t: t.narrow(2, 1, 4),
    "reshaped to itself": lambda t: t.reshape(2, 4, 6),
}


@pytest.mark.parametrize("rule", BOXES.values(), ids=BOXES)
def test_boxes_are_proven(rule: Callable[[torch.Tensor], torch.Tensor]) -> None:
    counted = torch.arange(48.0).view(2, 4, 6)
    (piece,) = AdapterMap(_Adapter(rule)).learn("w", (2, 4, 6), torch.float32)
    assert isinstance(piece, Piece), piece
    assert torch.equal(_shown(piece, counted), rule(counted))


def _only_with_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor * 2


def _by_value(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.flatten()[0].item() >= 0 else -tensor


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy[0] += 1
    return copy


OTHERS = {
    "arithmetic": (lambda t: t + 1, "computes"),
    "a copy changed in place": (_in_place, "writes to the tensor"),
    "every other row": (lambda t: t[:, ::2], "12 apart along a dim of 2 are not neighbours"),
    "flipped": (lambda t: t.flip(1), "computes"),
    "halves swapped": (lambda t: torch.cat([t[:, 2:], t[:, :2]], dim=1), "computes"),
    "two dims made one": (lambda t: t.reshape(8, 6), "over the end of a dim"),
    "one dim made two": (lambda t: t.view(2, 2, 2, 6), "not neighbours"),
    "a dim too many": (lambda t: t.unsqueeze(0), "4 dims"),
    "a diagonal": (lambda t: t.diagonal(dim1=1, dim2=2), "not neighbours"),
    "one row repeated": (lambda t: t[:1].expand(3, 4, 6), "not neighbours"),
    "by strides of a copy": (lambda t: t.transpose(1, 2).contiguous().as_strided((2, 3), (24, 1)), "reads memory"),
    "by strides": (lambda t: t.as_strided((2, 3), (24, 1)), "reads memory"),
    "another dtype": (lambda t: t.to(torch.bfloat16), "computes"),
    "other bits": (lambda t: t.view(torch.int32).view(torch.float32).abs(), "computes"),
    "a lazy sign": (torch._neg_view, "computes"),
    "ones": (lambda t: torch.ones(2), "computes"),
    "meta tensors let through": (_only_with_values, "aten.mul.Tensor computes with the tensor"),
    "depending on a value": (_by_value, "needs the values of the tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "reason"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_box_says_why(rule: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    """B20 B23: whatever is not provably elements of the tensor, in a box, is exported by the adapter itself."""
    (made,) = AdapterMap(_Adapter(rule)).learn("w", (2, 4, 6), torch.float32)
    assert isinstance(made, Unproven)
    assert reason in made.reason
    value = rule(torch.zeros(2, 4, 6))
    assert (made.shape, made.dtype) == (tuple(value.shape), value.dtype)


def test_one_result_computed_does_not_drag_the_others_along() -> None:
    """A scale of ones made beside the down projections: only it is left to the adapter."""
    *experts, scale = AdapterMap(ComputingAdapter()).learn(f"{PATH}.down_projs", (3, 5, 7), torch.float32)
    assert all(isinstance(piece, Piece) for piece in experts)
    assert isinstance(scale, Unproven)
    assert scale == Unproven("model.layers.1.mlp.router.scale", (3,), torch.float32, "ComputingAdapter computes it")


def test_nothing_is_guessed_for_large_tensors_that_need_values() -> None:
    with pytest.raises(DeclarationError, match=r"w \(4096, 4096\): _Adapter cannot say what it makes of it"):
        AdapterMap(_Adapter(_by_value)).learn("w", (4096, 4096), torch.float32)


def test_packed_integers_are_refused() -> None:
    """B55: an adapter that quantises on the way out."""
    with pytest.raises(DeclarationError, match=r"w: _Adapter makes it torch.int32 of torch.float32 weights"):
        AdapterMap(_Adapter(lambda t: (t * 7).to(torch.int32))).learn("w", (2, 4), torch.float32)


def test_an_adapter_without_the_method_says_what_to_set() -> None:
    with pytest.raises(DeclarationError, match=r"object converts no single tensor .*force_hf: true"):
        AdapterMap(object())


def test_dropped_and_scalar_tensors() -> None:
    """What the exclusion matches is not sent; a scalar is its own box."""
    learn = AdapterMap(SplitAdapter()).learn
    assert learn("model.layers.0.q_proj._extra_state", (3,), torch.float32) == ()
    assert learn("scale", (), torch.float32) == (Piece("scale", Region((), ()), ()),)
    assert learn("empty", (0, 3), torch.float32) == (Piece("empty", Region((0, 0), (0, 3)), (0, 1)),)


def test_interleaved_architectures_stay_with_the_loader() -> None:
    """B20: an adapter that only renames proves its tensors, and yet gate and up rows alternate inside."""
    naming = Naming(architecture="GptOssForCausalLM")
    tensors = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 3, 4), "norm.weight": torch.zeros(3)}
    source = DTensorSource(NamedTensors(tensors), 0, naming=naming, adapter=_Adapter(lambda t: t))
    assert [(name, "alternate" in why) for name, why in source.manifest(0).indirect] == [(next(iter(tensors)), True)]


def test_two_training_tensors_of_one_name_are_refused() -> None:
    class Same(_Adapter):
        def convert_single_tensor_to_hf(self, fqn: str, tensor: torch.Tensor, **_: object) -> Named:
            return [("model.norm.weight", tensor + 1 if fqn == "b" else tensor)]

    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(DeclarationError, match=r"model\.norm\.weight: rank 0 finds it in a and in b"):
        DTensorSource(NamedTensors(tensors), 0, adapter=Same(lambda t: t))
