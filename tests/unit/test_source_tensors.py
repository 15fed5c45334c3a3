"""What a source declares and shows of plain tensors and modules: strides, scalars, buffers, wrappers, ties, faults."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.manifest import Manifest
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.live import ModuleTensors, NamedTensors


def _whole(source: DTensorSource, name: str) -> torch.Tensor:
    spec = next(spec for spec in source.manifest(0).specs if spec.name == name)
    return source.view(name, Region.whole(spec.shape))


def _names(source: DTensorSource) -> list[str]:
    return [spec.name for spec in source.manifest(0).specs]


def test_strided_and_offset_tensors_are_shown_as_they_are() -> None:
    """B40 B42: a transposed tensor and a contiguous view with an offset; nothing is read from the storage's start."""
    turned, tail = torch.arange(6.0).view(2, 3).t(), torch.arange(6.0)[1:]
    source = DTensorSource(NamedTensors([("turned", turned), ("tail", tail)]), 0)
    assert torch.equal(_whole(source, "turned"), turned.contiguous())
    assert source.view("turned", Region((1, 1), (2, 1))).tolist() == [[4], [5]]
    assert _whole(source, "tail").tolist() == [1, 2, 3, 4, 5]
    assert source.view("tail", Region((2,), (2,))).tolist() == [3, 4]
    shards = source.manifest(0).shards
    assert [(shard.view.offset, shard.view.stride) for shard in shards] == [(0, (1, 3)), (0, (1,))]


def test_scalars_keep_their_shape() -> None:
    """B43: 0-d tensors beside others, of float and integer dtype."""
    source = DTensorSource(NamedTensors({"scale": torch.tensor(3.0), "steps": torch.tensor(7)}), 0)
    assert [(spec.shape, spec.dtype) for spec in source.manifest(0).specs] == [((), "float32"), ((), "int64")]
    assert _whole(source, "scale").shape == ()
    assert _whole(source, "scale").item() == 3.0
    assert _whole(source, "steps").item() == 7


def test_masters_are_rounded_to_nearest_even_when_cast() -> None:
    """B36: the source declares fp32; casting its view is the one rounding, ties to even."""
    source = DTensorSource(NamedTensors({"w": torch.tensor([1.00390625, 1.01171875, -1.00390625])}), 0)
    assert source.manifest(0).specs[0].dtype == "float32"
    assert _whole(source, "w").to(torch.bfloat16).tolist() == [1.0, 1.015625, -1.0]


class _Gate(nn.Module):
    """A router with a bias that training changes by hand, and a table that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("e_score_correction_bias", torch.zeros(2))
        self.register_buffer("inv_freq", torch.ones(3), persistent=False)


def test_persistent_buffers_are_declared_and_others_left_alone() -> None:
    """B53: also when training replaces the buffer object."""
    model = nn.ModuleDict({"gate": _Gate()})
    source = DTensorSource.from_model(model, 0)
    assert _names(source) == ["gate.weight", "gate.e_score_correction_bias"]
    assert _whole(source, "gate.e_score_correction_bias").tolist() == [0, 0]
    model["gate"].e_score_correction_bias += 0.5
    assert _whole(source, "gate.e_score_correction_bias").tolist() == [0.5, 0.5]
    model["gate"].e_score_correction_bias = torch.full((2,), 0.75)
    assert _whole(source, "gate.e_score_correction_bias").tolist() == [0.75, 0.75]


def test_replaced_parameters_are_followed_and_changed_ones_refused() -> None:
    """A view always shows the tensor that carries the name now, or says that its layout changed."""
    model = nn.Linear(3, 2, bias=False)
    source = DTensorSource.from_model(model, 0)
    model.weight = nn.Parameter(torch.full((2, 3), 4.0))
    assert _whole(source, "weight").unique().tolist() == [4.0]
    model.weight.data = torch.full((2, 3), 5.0)
    assert _whole(source, "weight").unique().tolist() == [5.0]
    model.weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(
        DeclarationError, match=r"weight: rank 0 declared.*\[2, 3\].*now holds.*\[3, 3\].*declare again"
    ):
        source.view("weight", Region((0, 0), (2, 3)))


def test_a_view_outside_the_declaration_is_refused() -> None:
    source = DTensorSource(NamedTensors({"w": torch.zeros(2, 3)}), 4)
    with pytest.raises(DeclarationError, match=r"rank 4 holds no \(1, 0\)\+\(2, 3\)"):
        source.view("w", Region((1, 0), (2, 3)))
    with pytest.raises(DeclarationError, match="rank 4 declared no tensor"):
        source.view("v", Region((0,), (1,)))
    with pytest.raises(DeclarationError, match=r"set up for rank 4.*declare rank 5"):
        source.manifest(5)


def test_a_local_part_taken_for_the_whole_is_refused() -> None:
    """B11: a plain tensor without placements, smaller than the configuration says."""
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(DeclarationError, match=rf"{name}: rank 3 .*\(4, 2\).*\(4, 4\)"):
        DTensorSource(NamedTensors({name: torch.zeros(4, 2)}), 3, shapes={name: (4, 4)})


def test_wrapper_prefixes_are_dropped() -> None:
    tensors = {
        "module._orig_mod.model.norm.weight": torch.zeros(2),
        "module._orig_mod.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up.weight": torch.zeros(3),
    }
    assert _names(DTensorSource(NamedTensors(tensors), 0)) == ["model.norm.weight", "model.layers.0.mlp.up.weight"]


LORA = {
    "base_model.model.model.layers.0.mlp.down_proj.base_layer.weight": torch.ones(2, 3),
    "base_model.model.model.layers.0.mlp.down_proj.lora_A.default.weight": torch.zeros(1, 3),
    "base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight": torch.zeros(2, 1),
    "base_model.model.lm_head.original_module.weight": torch.zeros(4, 3),
    "base_model.model.lm_head.modules_to_save.default.weight": torch.full((4, 3), 2.0),
}


def test_adapters_are_counted_and_only_merged_weights_sent() -> None:
    """B58: plain names; the trained copy of a whole module stands for it; adapter tensors are excluded."""
    source = DTensorSource(NamedTensors(LORA, merged=True), 0)
    assert _names(source) == ["model.layers.0.mlp.down_proj.weight", "lm_head.weight"]
    assert _whole(source, "lm_head.weight").unique().tolist() == [2.0]
    assert len(source.excluded) == 3


def test_unmerged_adapters_are_refused() -> None:
    """B58: at the declaration, and at a refit after the trainer took them apart again."""
    with pytest.raises(DeclarationError, match=r"down_proj\.base_layer\.weight: its adapter is not merged"):
        DTensorSource(NamedTensors(LORA), 0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(3, 2, bias=False)
            self.lora_A = nn.Linear(3, 1, bias=False)
            self.merged = False

    model = nn.ModuleDict({"one": Layer(), "two": Layer()})
    model["one"].merged = True
    with pytest.raises(DeclarationError, match=r"1 fault\n  - two\.base_layer.weight"):
        DTensorSource(ModuleTensors(model), 0)
    model["two"].merged = True
    source = DTensorSource(ModuleTensors(model), 0)
    assert _names(source) == ["one.weight", "two.weight"]
    model["one"].merged = False
    with pytest.raises(DeclarationError, match=r"one\.base_layer\.weight: its adapter is not merged"):
        source.view("one.weight", Region((0, 0), (2, 3)))


class _Tied(nn.Module):
    """Embedding and head, tied or not, under a configuration that says what it says."""

    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, shared: bool, **flags: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 2), nn.Linear(2, 6, bias=False)
        if shared:
            self.head.weight = self.embed.weight
        self.config = type("Config", (), {})()
        self.config.tie_word_embeddings = flags["top"]
        if "text" in flags:
            self.config.text_config = type("Config", (), {"tie_word_embeddings": flags["text"]})()


def test_a_tie_is_declared_once_with_its_alias() -> None:
    """B32: the flag says tied and training shares one object."""
    source = DTensorSource.from_model(_Tied(True, top=True), 0)
    assert _names(source) == ["embed.weight"]
    assert source.aliases == {"head.weight": "embed.weight"}


def test_a_broken_tie_is_refused() -> None:
    """B32: the flag says tied and training holds two tensors that drift apart."""
    with pytest.raises(DeclarationError, match=r"head\.weight is tied to embed\.weight by the configuration"):
        DTensorSource.from_model(_Tied(False, top=True), 0)


@pytest.mark.parametrize("model", [_Tied(False, top=False), _Tied(False, top=True, text=False), _Tied(True, top=False)])
def test_without_a_clear_tie_both_names_are_declared(model: nn.Module) -> None:
    """B33: levels of the configuration contradict each other, or none claims a tie; a head is never dropped."""
    source = DTensorSource.from_model(model, 0)
    assert _names(source) == ["embed.weight", "head.weight"]
    assert source.aliases == {}


def test_all_faults_come_at_once() -> None:
    tensors = {
        "a": torch.zeros(2, dtype=torch.complex64),
        "b": torch.zeros(2, device="meta"),
        "c": torch.zeros(2).to_sparse(),
        "module.d": torch.zeros(2),
        "d": torch.zeros(2),
    }
    with pytest.raises(DeclarationError) as caught:
        DTensorSource(NamedTensors(tensors), 2)
    message = str(caught.value)
    assert "rank 2: 4 faults" in message
    for part in (
        "a: unknown dtype 'complex64'",
        "b: rank 2 holds it on the meta",
        "c: rank 2 holds a",
        "d: rank 2 holds it as",
    ):
        assert part in message


def test_views_allocate_nothing_and_change_nothing() -> None:
    """B24 B76: 24 MiB of stacked experts are declared and shown without a byte of new storage."""
    stacked = torch.arange(3 * 1024 * 2048, dtype=torch.float32).view(3, 1024, 2048)
    before = stacked.clone()
    allocated: list[int] = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if (
                isinstance(out, torch.Tensor)
                and out.untyped_storage().data_ptr() != stacked.untyped_storage().data_ptr()
            ):
                allocated.append(out.untyped_storage().nbytes())
            return out

    from nemo_rl_reshard.sources.naming import Naming

    naming = Naming(hidden_size=2048, expert_size=512)
    with Count():
        source = DTensorSource(NamedTensors({"mlp.experts.gate_up_proj": stacked}), 0, naming=naming)
        for _ in range(2):
            views = [source.view(shard.tensor, shard.region) for shard in source.manifest(0).shards]
    assert allocated == []
    assert sum(view.nbytes for view in views) == stacked.nbytes
    assert torch.equal(stacked, before)


def test_manifests_survive_plain_types() -> None:
    source = DTensorSource(NamedTensors({"w": torch.zeros(2, 3), "s": torch.tensor(1.0)}), 0)
    manifest = source.manifest(0)
    assert Manifest.from_plain(manifest.to_plain()) == manifest
