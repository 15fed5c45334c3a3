"""LoRA layers that keep their weight's name: merged bit for bit as NeMo RL does, or refused by name."""

from __future__ import annotations

import pytest
import torch
from equipment.automodel_like import LinearLoRA, Model, SplitAdapter, merged_by_hand
from torch import nn

from nemo_rl_reshard.errors import DeclarationError, StateError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.low_rank import MERGED


def _layer(dtype: torch.dtype = torch.float32, **options: float | None) -> LinearLoRA:
    layer = LinearLoRA(7, 10, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for seed, weight in enumerate(layer.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    return layer.to(dtype)


def _expected(layer: LinearLoRA, scale: float) -> torch.Tensor:
    return merged_by_hand(layer.weight.detach(), layer.lora_A.weight.detach(), layer.lora_B.weight.detach(), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adapter", [None, SplitAdapter()], ids=["by config", "by adapter"])
def test_merged_values_and_untouched_training(dtype: torch.dtype, adapter: SplitAdapter | None) -> None:
    """B24 B58: two refits, whole and in parts; bits as on the gathered tensor; training holds what it held."""
    model = nn.ModuleDict({"q_proj": _layer(dtype)})
    model.state_dict_adapter = adapter
    source = DTensorSource.from_model(model, 0)
    manifest = source.manifest(0)
    assert [spec.name for spec in manifest.specs] == ["q_proj.weight"]
    assert manifest.indirect == (("q_proj.weight", MERGED),)
    assert source.excluded == ("q_proj.lora_A.weight", "q_proj.lora_B.weight")
    for _ in range(2):
        held = {name: value.clone() for name, value in model.state_dict().items()}
        expected = _expected(model["q_proj"], 0.75)
        source.prepare()
        assert torch.equal(source.view("q_proj.weight", Region((0, 0), (10, 7))), expected)
        part = Region((3, 1), (5, 4))
        assert torch.equal(source.view("q_proj.weight", part), expected[part.slices])
        source.release()
        assert all(torch.equal(held[name], value) for name, value in model.state_dict().items())
        with torch.no_grad():
            model["q_proj"].lora_B.weight.mul_(-3)


def test_factors_of_another_dtype_are_cast_to_the_weights() -> None:
    """B36: bf16 base and fp32 factors: the product is taken in the base's dtype, as NeMo RL takes it."""
    layer = _layer()
    layer.weight.data = layer.weight.data.to(torch.bfloat16)
    source = DTensorSource.from_model(layer, 0)
    source.prepare()
    found = source.view("weight", Region((0, 0), (10, 7)))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, _expected(layer, 0.75))


def test_the_scale_is_found_where_nemo_rl_finds_it() -> None:
    """`scale`, else alpha / dim, else 1; read anew at each refit."""
    layer = _layer(scale=None)
    source = DTensorSource.from_model(layer, 0)
    for attributes, scale in (({}, 1.0), ({"alpha": 32, "dim": 5}, 32 / 5), ({"scale": 0.3}, 0.3)):
        for name, value in attributes.items():
            setattr(layer, name, value)
        source.prepare()
        assert torch.equal(source.view("weight", Region((0, 0), (10, 7))), _expected(layer, scale))


def test_the_base_weight_never_goes_instead() -> None:
    """Outside a refit there are no factors, and the plain weight would be the wrong one."""
    source = DTensorSource.from_model(_layer(), 0)
    with pytest.raises(StateError, match="weight: its LoRA factors are gathered at the start of a refit"):
        source.view("weight", Region((0, 0), (10, 7)))
    source.prepare()
    source.release()
    with pytest.raises(StateError):
        source.view("weight", Region((0, 0), (10, 7)))
    assert source.devices() == {torch.device("cpu")}


def test_factors_are_compared_across_replicas() -> None:
    """Ranks that hold copies of a factor without a mesh that says so would merge different values."""
    source = DTensorSource.from_model(Model(lora=True), 0)
    hashed = {entry.tensor for entry in source.replica_digests(num_trainers=2)}
    assert {f"model.layers.0.q_proj.lora_{which}.weight" for which in "AB"} <= hashed


class _GroupedLoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_and_up_projs = nn.Parameter(torch.zeros(2, 3, 4))
        self.down_projs = nn.Parameter(torch.zeros(2, 2, 3))
        self.lora_gate_and_up_A = nn.Parameter(torch.zeros(2, 3, 1))


class _Dora(LinearLoRA):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.lora_magnitude = nn.Parameter(torch.ones(4))


class _OtherLoRA(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.lora_A, self.lora_B = nn.Linear(3, 1, bias=False), nn.Linear(1, 4, bias=False)


class _Quantised(LinearLoRA):
    def __init__(self) -> None:
        super().__init__(3, 4)
        self.quant_state = object()


def test_what_cannot_be_merged_is_refused_by_name_all_at_once() -> None:
    """B58: experts' LoRA, DoRA, an unknown class, a quantised base, factors that do not fit: one error."""
    misfit = LinearLoRA(3, 4)
    misfit.lora_B = nn.Linear(2, 4, bias=False)
    model = nn.ModuleDict(
        {"experts": _GroupedLoRA(), "d": _Dora(), "o": _OtherLoRA(), "q": _Quantised(), "m": misfit, "n": _layer()}
    )
    with pytest.raises(DeclarationError) as caught:
        DTensorSource.from_model(model, 3)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("rank 3: 7 faults")
    assert [line.split(":")[0].removeprefix("  - ") for line in lines[1:]] == [
        "experts.gate_and_up_projs", "experts.down_projs", "d.weight", "o.weight", "o.bias", "q.weight",
        "m.weight (4, 3)",
    ]  # fmt: skip
    assert "_GroupedLoRA holds experts.lora_gate_and_up_A: LoRA of grouped experts and DoRA are not merged" in lines[1]
    assert "_Dora holds d.lora_magnitude" in lines[3]
    assert "is no LinearLoRA: how to merge it is not known" in lines[4]
    assert "quantised" in lines[6]
    assert "(3, 3) and m.lora_B.weight (4, 2) do not fit" in lines[7]
