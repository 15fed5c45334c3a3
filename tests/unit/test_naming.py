"""Training tensors under checkpoint names: stacked experts, orientations, interleaving, rules that are no slice."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.live import NamedTensors
from nemo_rl_reshard.sources.naming import Form, Naming, Rule, StackedExperts

PATH = "model.layers.0.mlp.experts"
B19 = Naming("Qwen3MoeForCausalLM", hidden_size=3, expert_size=2)


def _gate_up() -> torch.Tensor:
    """gate_up[e, r, c] = 100 e + 10 r + c, of 2 experts, 2 + 2 rows, 3 columns."""
    expert, row, column = torch.meshgrid(torch.arange(2), torch.arange(4), torch.arange(3), indexing="ij")
    return (100 * expert + 10 * row + column).float()


def _views(tensors: dict[str, torch.Tensor], naming: Naming) -> dict[str, torch.Tensor]:
    """Each checkpoint tensor as the source shows it whole."""
    source = DTensorSource(NamedTensors(tensors), 0, naming=naming)
    return {spec.name: source.view(spec.name, Region.whole(spec.shape)) for spec in source.manifest(0).specs}


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_become_single_ones(suffix: str) -> None:
    """B19: both spellings; rows 0-1 of an expert are gate, rows 2-3 up."""
    down = torch.arange(12.0).view(2, 3, 2)
    shown = _views({f"{PATH}.gate_up_proj{suffix}": _gate_up(), f"{PATH}.down_proj{suffix}": down}, B19)
    assert list(shown) == [
        f"{PATH}.{expert}.{projection}.weight"
        for projections in (("gate_proj", "up_proj"), ("down_proj",))
        for expert in (0, 1)
        for projection in projections
    ]
    assert shown[f"{PATH}.1.gate_proj.weight"].tolist() == [[100, 101, 102], [110, 111, 112]]
    assert shown[f"{PATH}.1.up_proj.weight"].tolist() == [[120, 121, 122], [130, 131, 132]]
    assert torch.equal(shown[f"{PATH}.1.down_proj.weight"], down[1])


def test_transposed_experts_are_turned_by_stride() -> None:
    """B19: [E, H, 2I] is told by the configuration's sizes; the view shares the trainer's storage."""
    stored = _gate_up().transpose(1, 2).contiguous()
    shown = _views({f"{PATH}.gate_up_proj": stored}, B19)
    up = shown[f"{PATH}.1.up_proj.weight"]
    assert up.tolist() == [[120, 121, 122], [130, 131, 132]]
    assert up.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    assert up.stride() == (1, 4)


@pytest.mark.parametrize(
    ("leaf", "shape", "sizes"), [("gate_up_proj", (2, 4, 4), (4, 2)), ("down_proj", (2, 3, 3), (3, 3))]
)
def test_a_square_expert_needs_a_declared_orientation(
    leaf: str, shape: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    """B19: with 2I == H (or I == H for down) the shape says nothing, so it is refused unless declared."""
    naming = Naming(hidden_size=sizes[0], expert_size=sizes[1])
    tensors = {f"{PATH}.{leaf}": torch.arange(float(torch.Size(shape).numel())).view(shape)}
    with pytest.raises(DeclarationError, match=f"{leaf}.*both orientations.*declare it"):
        _views(tensors, naming)
    for transposed in (False, True):
        declared = Naming(hidden_size=sizes[0], expert_size=sizes[1], stacked=StackedExperts(transposed=transposed))
        stored = tensors[f"{PATH}.{leaf}"][1]
        shown = list(_views(tensors, declared).values())
        whole = torch.cat(shown[len(shown) // 2 :])
        assert torch.equal(whole, stored.T if transposed else stored)


def test_experts_of_unknown_or_wrong_size_are_refused() -> None:
    with pytest.raises(DeclarationError, match="no sizes known"):
        Naming().pieces(f"{PATH}.gate_up_proj", (2, 4, 3))
    with pytest.raises(DeclarationError, match=r"shape \(2, 6, 3\).*make it \(2, 4, 3\)"):
        B19.pieces(f"{PATH}.gate_up_proj", (2, 6, 3))
    with pytest.raises(DeclarationError, match="5 rows are not gate and up"):
        Naming(stacked=StackedExperts(transposed=False)).pieces(f"{PATH}.gate_up_proj", (2, 5, 3))


@pytest.mark.parametrize(
    "naming",
    [Naming("GptOssForCausalLM", 3, 2), Naming("Other", 3, 2, stacked=StackedExperts(True, interleaved=True))],
    ids=["by architecture", "by the module's word"],
)
def test_interleaved_experts_stay_whole_and_indirect(naming: Naming) -> None:
    """B20: gate and up rows alternate, so weights and biases of the group go together to the engine's loader."""
    shapes = {"gate_up_proj": (2, 3, 4), "gate_up_proj_bias": (2, 4), "down_proj": (2, 2, 3), "down_proj_bias": (2, 3)}
    for leaf, shape in shapes.items():
        (piece,) = naming.pieces(f"{PATH}.{leaf}", shape)
        assert (piece.name, piece.shape) == (f"{PATH}.{leaf}", shape)
        assert "alternate" in piece.indirect


def test_biases_of_stacked_experts_are_indirect() -> None:
    (piece,) = B19.pieces(f"{PATH}.gate_up_proj_bias", (2, 4))
    assert piece.name == f"{PATH}.gate_up_proj_bias"
    assert "biases" in piece.indirect


def test_routers_and_shared_experts_are_plain_tensors() -> None:
    for name in ("gate.weight", "shared_expert.gate_proj.weight", "shared_experts.up_proj.weight"):
        (piece,) = B19.pieces(f"model.layers.0.mlp.{name}", (4, 3))
        assert (piece.name, piece.dims, piece.indirect) == (f"model.layers.0.mlp.{name}", (0, 1), "")


def test_ungated_experts_have_one_projection_per_tensor() -> None:
    pieces = B19.pieces("backbone.layers.1.mixer.experts.up_proj", (3, 2, 3))
    assert [piece.name for piece in pieces] == [
        f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight" for expert in range(3)
    ]
    assert {piece.shape for piece in pieces} == {(2, 3)}


def test_expert_names_and_renames_are_given_as_values() -> None:
    naming = Naming(
        hidden_size=3,
        expert_size=2,
        expert_names=("w1", "w3", "w2"),
        renames=((r"\.mlp\.", ".block_sparse_moe."),),
    )
    names = [piece.name for piece in naming.pieces(f"{PATH}.gate_up_proj", (1, 4, 3))]
    assert names == [f"model.layers.0.block_sparse_moe.experts.0.{leaf}.weight" for leaf in ("w1", "w3")]


def test_a_transposed_tensor_is_direct_and_a_computed_one_is_not() -> None:
    """B23: only pure slices and transposes may travel directly; a computed value comes from its export."""
    tensors = {"norm.weight": torch.zeros(4), "proj.weight": torch.arange(6.0).view(2, 3)}
    naming = Naming(
        rules=(
            Rule(r"norm\.weight", Form.COMPUTED, "stored around zero", export=lambda stored: stored + 1),
            Rule(r"proj\.weight", Form.TRANSPOSED),
        )
    )
    source = DTensorSource(NamedTensors(tensors), 0, naming=naming)
    manifest = source.manifest(0)
    assert manifest.indirect == (("norm.weight", "stored around zero"),)
    assert [spec.shape for spec in manifest.specs] == [(4,), (3, 2)]
    assert source.view("proj.weight", Region((1, 0), (2, 2))).tolist() == [[1, 4], [2, 5]]
    for _ in range(3):  # B24: an export may not change the trainer's own weight, however often it runs
        assert source.view("norm.weight", Region((0,), (4,))).tolist() == [1, 1, 1, 1]
        assert tensors["norm.weight"].tolist() == [0, 0, 0, 0]


def test_a_computed_tensor_without_export_is_refused_by_name() -> None:
    """B23: sending the raw tensor would corrupt silently."""
    naming = Naming(rules=(Rule(r".*norm\.weight", Form.COMPUTED, "stored around zero"),))
    with pytest.raises(DeclarationError, match=r"model\.norm\.weight: .*stored around zero.*give rule"):
        DTensorSource(NamedTensors({"model.norm.weight": torch.zeros(4)}), 0, naming=naming)
    with pytest.raises(DeclarationError, match="needs the reason"):
        Rule("x", Form.COMPUTED)


def test_an_export_in_place_leaves_the_trainer_as_it_is() -> None:
    """B24: the fault that added 1 to the trainer's norm at every refit."""
    stored = torch.zeros(4)
    rule = Rule(r"norm\.weight", Form.COMPUTED, "stored around zero", export=lambda stored: stored.add_(1))
    source = DTensorSource(NamedTensors({"norm.weight": stored}), 0, naming=Naming(rules=(rule,)))
    for _ in range(3):
        assert source.view("norm.weight", Region((1,), (2,))).tolist() == [1, 1]
    assert stored.tolist() == [0, 0, 0, 0]


def test_an_export_that_is_not_elementwise_is_refused() -> None:
    rule = Rule(r"norm\.weight", Form.COMPUTED, "a sum", export=lambda stored: stored.sum())
    source = DTensorSource(NamedTensors({"norm.weight": torch.zeros(4)}), 0, naming=Naming(rules=(rule,)))
    with pytest.raises(DeclarationError, match=r"norm\.weight: its export made shape"):
        source.view("norm.weight", Region((0,), (4,)))


def test_sizes_come_from_the_text_part_of_a_configuration() -> None:
    class Text:
        hidden_size = 6
        moe_intermediate_size = 4
        intermediate_size = 12

    class Composite:
        text_config = Text
        architectures = ("SomeVisionModel",)
        hidden_size = 99

    naming = Naming.from_config(Composite, architecture="Wrapper")
    assert (naming.architecture, naming.hidden_size, naming.expert_size) == ("SomeVisionModel", 6, 4)
