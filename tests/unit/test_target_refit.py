"""VllmTarget on toy models, through vLLM's own reload functions: packing, derived tensors, gaps, failures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nemo_rl_reshard.errors import StateError, TargetError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.targets.vllm_compat import VllmNames

pytest.importorskip("vllm", exc_type=ImportError)

from equipment import stub_engine as stub


@pytest.fixture(scope="module")
def names() -> VllmNames:
    return stub.vllm_names()


def weights(gate: float, up: float, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Position-coded, so that rows and halves cannot be confused."""
    codes = torch.arange(6, dtype=torch.float32).view(2, 3) / 8
    return {"mlp.gate": gate + codes, "mlp.up": up - codes, **more}


def fused(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([values["mlp.gate"], values["mlp.up"]])


def swap_halves(layer: nn.Module) -> None:
    """What flashinfer kernels want: up above gate."""
    layer.weight.data = torch.cat(layer.weight.data.chunk(2)[::-1])


def into_blocks(layer: nn.Module) -> None:
    """A kernel layout of four dims, which the loader no longer understands."""
    blocks = layer.weight.data.view(2, 2, 1, 3).permute(1, 0, 3, 2).contiguous()
    layer.weight = nn.Parameter(blocks, requires_grad=False)


def forget_loader(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


def nothing(layer: nn.Module) -> None:
    """Processing that leaves everything as it is."""


def test_layers_that_nothing_processes_are_written_in_place(names: VllmNames) -> None:
    model = stub.started(stub.StubModel(mlp=stub.GateUp(), norm=stub.Plain(4)), names, first := {
        **weights(1, 2), "norm.weight": torch.ones(4)})  # fmt: skip
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(first))
    assert {found.mode for found in target.modes.values()} == {"live"}
    address, alias = model.mlp.weight.data_ptr(), model.mlp.weight.view(-1)
    for version in (1, 2):
        wanted = {**weights(version * 3, version * 5), "norm.weight": torch.arange(4.0) * version}
        stub.refit(target, wanted, version)
        assert torch.equal(model.mlp.weight, fused(wanted))
        assert torch.equal(alias.view(4, 3), fused(wanted)), "B49: a view taken before must show the new values"
        assert torch.equal(model.norm.weight, wanted["norm.weight"])
        assert model.mlp.weight.data_ptr() == address
        assert target.version == version


@pytest.mark.parametrize("step", [swap_halves, into_blocks, forget_loader], ids=lambda step: step.__name__)
def test_processed_layers_are_restored_written_and_processed_once(names: VllmNames, step: Any) -> None:
    """B46, B47, B48: other layout, one-time swap, lost loader; two refits, each processing the layer once."""
    method = stub.post_load(names, step)
    model = stub.started(stub.StubModel(mlp=stub.GateUp(method=method)), names, weights(1, 2))
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(weights(1, 2)))
    assert target.modes["mlp"].mode == "packed"
    assert target.modes["mlp"].reason
    before = method.num_calls
    kept, address = model.mlp.weight, model.mlp.weight.data_ptr()
    for version, wanted in enumerate((weights(1, 2), weights(3, 4)), start=1):
        stub.refit(target, wanted, version)
        fresh = stub.started(stub.StubModel(mlp=stub.GateUp(method=stub.post_load(names, step))), names, wanted)
        assert torch.equal(model.mlp.weight, fresh.mlp.weight)
        assert model.mlp.weight is kept
        assert model.mlp.weight.data_ptr() == address
        assert method.num_calls == before + version


@pytest.mark.parametrize("step", [swap_halves, into_blocks, forget_loader], ids=lambda step: step.__name__)
def test_live_mode_refuses_what_it_cannot_prove_b46(names: VllmNames, step: Any) -> None:
    """B46: even where every shape agrees; and the experiment leaves no trace."""
    method = stub.post_load(names, step)
    model = stub.started(stub.StubModel(mlp=stub.GateUp(method=method)), names, weights(1, 2))
    held, content = model.mlp.weight, model.mlp.weight.clone()
    with pytest.raises(TargetError, match="layer mlp: "):
        stub.target_of(model, names, "live").manifest(0, stub.specs_of(weights(1, 2)))
    assert model.mlp.weight is held
    assert torch.equal(held, content)


def test_a_matmul_that_reads_a_copy_is_found_b45(names: VllmNames) -> None:
    """B45: the weight stays and looks right, and the kernel computes with a packed copy of it."""

    def pack(layer: nn.Module) -> None:
        packed = layer.weight.data.t().contiguous()
        layer.quant_method.apply = lambda layer, x, bias=None: x @ packed

    model = stub.started(stub.StubModel(mlp=stub.GateUp(method=stub.post_load(names, pack))), names, weights(1, 2))
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(weights(1, 2)))
    assert target.modes["mlp"].reason == "the matmul computes with a packed copy of weight"
    for version in (1, 2):
        stub.refit(target, wanted := weights(version + 2, 5), version)
        assert torch.equal(model.mlp.quant_method.apply(model.mlp, torch.eye(3)).t(), fused(wanted))


def test_packed_mode_writes_through_the_layer_s_own_processing(names: VllmNames) -> None:
    method = stub.post_load(names, nothing)
    model = stub.started(stub.StubModel(mlp=stub.GateUp(method=method)), names, weights(1, 2))
    auto, packed = stub.target_of(model, names), stub.target_of(model, names, "packed")
    for target, mode in ((auto, "live"), (packed, "packed")):
        target.manifest(0, stub.specs_of(weights(1, 2)))
        assert target.modes["mlp"].mode == mode
        stub.refit(target, weights(7, 9), 1)
        assert torch.equal(model.mlp.weight, fused(weights(7, 9)))


class Absorbing(nn.Module):
    """Keeps what it derives from `proj`, as MLA does from kv_b_proj, and makes it anew in its post-load step."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        twice = (self.proj.weight * 2).to(act_dtype)
        if hasattr(self, "absorbed"):
            self.absorbed.copy_(twice)
        else:
            self.absorbed = twice


def test_absorbed_attention_weights_follow_b50(names: VllmNames) -> None:
    """B50: derived matrices hold the new values at the old address."""

    class Attention(Absorbing, names.latent_attention):  # type: ignore[name-defined]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.proj = stub.Plain(4, 2)

    first = {"attn.proj.weight": torch.arange(8.0).view(4, 2)}
    model = stub.started(stub.StubModel(attn=Attention()), names, first)
    address = model.attn.absorbed.data_ptr()
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(first))
    for version in (1, 2):
        wanted = {"attn.proj.weight": first["attn.proj.weight"] * 3 * version + 1}
        stub.refit(target, wanted, version)
        assert torch.equal(model.attn.absorbed, wanted["attn.proj.weight"] * 2)
        assert model.attn.absorbed.data_ptr() == address


class PlusOne(stub.Plain):
    """Caches weight + 1, as gemma-type norms do."""

    def __init__(self) -> None:
        super().__init__(4)
        self.plus_one = torch.ones(4)

    def renew(self) -> None:
        self.plus_one.copy_(self.weight + 1)


def test_a_cache_without_a_hook_is_refused_b51(names: VllmNames) -> None:
    first = {"norm.weight": torch.zeros(4)}
    model = stub.started(stub.StubModel(norm=PlusOne()), names, first)
    with pytest.raises(TargetError, match=r"layer norm \(PlusOne\) keeps plus_one"):
        stub.target_of(model, names).manifest(0, stub.specs_of(first))


def test_a_hook_runs_once_per_refit_b51(names: VllmNames) -> None:
    first = {"norm.weight": torch.zeros(4)}
    model = stub.started(stub.StubModel(norm=PlusOne()), names, first)
    renewed: list[nn.Module] = []

    def hook(module: nn.Module) -> None:
        renewed.append(module)
        module.renew()

    target = stub.target_of(model, names, hooks={"PlusOne": hook})
    target.manifest(0, stub.specs_of(first))
    for version in (1, 2):
        stub.refit(target, {"norm.weight": torch.full((4,), float(version))}, version)
        assert torch.equal(model.norm.plus_one, torch.full((4,), version + 1.0))
        assert len(renewed) == version


def test_a_tensor_that_never_arrives_is_named_b52(names: VllmNames) -> None:
    """B52: one small tensor left out; the error names it and the parameter, and a full refit heals the engine."""
    first = weights(1, 2, **{"mixer.weight": torch.ones(5)})
    model = stub.started(stub.StubModel(mlp=stub.GateUp(), mixer=stub.Plain(5)), names, first)
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(first))
    target.begin(1)
    stub.write(target, weights(3, 4))
    with pytest.raises(TargetError) as caught:
        target.finish(1)
    assert "1 tensors never arrived: mixer.weight" in str(caught.value)
    assert "parameter mixer.weight: 0 of 5 elements" in str(caught.value)
    assert target.version is None
    target.abandon()
    stub.refit(target, wanted := weights(5, 6, **{"mixer.weight": torch.arange(5.0)}), 2)
    assert torch.equal(model.mixer.weight, wanted["mixer.weight"])
    assert target.version == 2


def test_a_region_that_never_arrives_is_counted_b52(names: VllmNames) -> None:
    model = stub.started(stub.StubModel(mlp=stub.GateUp()), names, weights(1, 2))
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(weights(1, 2)))
    target.begin(1)
    target.view("mlp.gate", Region((0, 0), (1, 3))).zero_()
    target.view("mlp.gate", Region((0, 0), (1, 3))).zero_()
    target.tensor_done("mlp.gate")
    target.view("mlp.up", Region((0, 0), (2, 3))).zero_()
    target.tensor_done("mlp.up")
    with pytest.raises(TargetError, match=r"parameter mlp.weight: 9 of 12 elements"):
        target.finish(1)


class Router(stub.Plain):
    """A weight, a trained buffer, and a table that is no checkpoint tensor."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.register_buffer("e_score_correction_bias", torch.zeros(2))
        self.register_buffer("table", torch.arange(7.0), persistent=False)


def test_trained_buffers_arrive_and_tables_are_left_alone_b53(names: VllmNames) -> None:
    first = {"gate.weight": torch.zeros(2, 3), "gate.e_score_correction_bias": torch.zeros(2)}
    model = stub.started(stub.StubModel(gate=Router()), names, first)
    buffer, address = model.gate.e_score_correction_bias, model.gate.e_score_correction_bias.data_ptr()
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(first))
    for version in (1, 2):
        wanted = {
            "gate.weight": torch.arange(6.0).view(2, 3) * version,
            "gate.e_score_correction_bias": torch.tensor([0.5, 0.1]) * version,
        }
        stub.refit(target, wanted, version)
        assert torch.equal(buffer, wanted["gate.e_score_correction_bias"])
        assert model.gate.e_score_correction_bias is buffer
        assert buffer.data_ptr() == address
        assert torch.equal(model.gate.table, torch.arange(7.0))


def test_a_quantised_layer_is_refused_b55(names: VllmNames) -> None:
    class Scaled(names.quantize_method):  # type: ignore[name-defined,misc]
        def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
            raise NotImplementedError

        def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

    model = stub.started(stub.StubModel(mlp=stub.GateUp(method=Scaled())), names, weights(1, 2))
    with pytest.raises(TargetError, match=r"layer mlp: Scaled holds weight \(torch.float32\)"):
        stub.target_of(model, names).manifest(0, stub.specs_of(weights(1, 2)))


def test_a_sleeping_engine_is_refused_b63(names: VllmNames) -> None:
    sleeping = [False]
    model = stub.started(stub.StubModel(mlp=stub.GateUp()), names, weights(1, 2))
    target = stub.target_of(model, names, asleep=lambda: sleeping[0])
    target.manifest(0, stub.specs_of(weights(1, 2)))
    sleeping[0] = True
    with pytest.raises(TargetError, match="asleep"):
        target.begin(1)
    sleeping[0] = False
    stub.refit(target, weights(3, 4), 1)
    assert torch.equal(model.mlp.weight, fused(weights(3, 4)))


def test_discarded_weights_are_refused_until_they_have_memory_b64(names: VllmNames) -> None:
    """B64: a deep sleep throws the weights away; a refit before waking is refused, a full one after it is enough."""
    model = stub.started(stub.StubModel(mlp=stub.GateUp()), names, weights(1, 2))
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(weights(1, 2)))
    storage = model.mlp.weight.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    with pytest.raises(TargetError, match=r"1 parameters have no memory, mlp.weight"):
        target.begin(1)
    storage.resize_(nbytes)
    target.manifest(0, stub.specs_of(weights(1, 2)))
    stub.refit(target, weights(3, 4), 1)
    assert torch.equal(model.mlp.weight, fused(weights(3, 4)))


class Padded(stub.Plain):
    """Holds rows for `real` checkpoint rows and some more, which its loader sets to zero, or leaves if `fills` is false
    (then it says how many elements a checkpoint fills, as padded experts do)."""

    def __init__(self, rows: int, real: int, fills: bool) -> None:
        super().__init__(rows, 3)
        self.weight.weight_loader = self.load
        self.real, self.fills = real, fills
        if not fills:
            self.weight.weight_loader_numel = real * 3

    def load(self, param: torch.Tensor, tensor: torch.Tensor, half: int) -> None:
        del half
        param.data[: self.real].copy_(tensor)
        if self.fills:
            param.data[self.real :].fill_(0)


@pytest.mark.parametrize("fills", [True, False])
def test_padding_of_weights_written_in_place_is_made_anew_b35_b64(names: VllmNames, fills: bool) -> None:
    """Dummy weights and discarded memory leave anything in the elements that no tensor fills, NaN included."""
    first = {"mlp.gate": torch.ones(3, 3)}
    model = stub.started(stub.StubModel(mlp=Padded(5, 3, fills)), names, first)
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(first))
    assert target.modes["mlp"].mode == "live"
    for version in (1, 2):
        model.mlp.weight.data.fill_(torch.nan)
        stub.refit(target, wanted := {"mlp.gate": torch.arange(9.0).view(3, 3) * version}, version)
        assert torch.equal(model.mlp.weight, torch.cat([wanted["mlp.gate"], torch.zeros(2, 3)]))


def test_abandon_puts_a_half_written_layer_back_b63(names: VllmNames) -> None:
    method = stub.post_load(names, swap_halves)
    model = stub.started(stub.StubModel(mlp=stub.GateUp(method=method)), names, weights(1, 2))
    target = stub.target_of(model, names, "packed")
    target.manifest(0, stub.specs_of(weights(1, 2)))
    held, content = model.mlp.weight, model.mlp.weight.clone()
    target.begin(1)
    target.view("mlp.gate", Region((0, 0), (2, 3))).fill_(99)
    assert model.mlp.weight is not held
    assert target.peak_extra_bytes == held.nbytes
    target.abandon()
    assert model.mlp.weight is held
    assert torch.equal(model.mlp.weight, content)
    with pytest.raises(StateError, match="no refit is open"):
        target.finish(1)
    stub.refit(target, weights(3, 4), 2)
    fresh = stub.started(
        stub.StubModel(mlp=stub.GateUp(method=stub.post_load(names, swap_halves))), names, weights(3, 4)
    )
    assert torch.equal(model.mlp.weight, fresh.mlp.weight)


def test_calls_out_of_order_name_the_state(names: VllmNames) -> None:
    model = stub.started(stub.StubModel(mlp=stub.GateUp()), names, weights(1, 2))
    target = stub.target_of(model, names)
    with pytest.raises(StateError, match="call manifest first"):
        target.begin(1)
    target.manifest(0, stub.specs_of(weights(1, 2)))
    with pytest.raises(StateError, match="view: no refit is open"):
        target.view("mlp.gate", Region((0, 0), (1, 3)))
    target.begin(1)
    with pytest.raises(StateError, match="version 1 is still open"):
        target.begin(2)
    with pytest.raises(TargetError, match="in no declared shard"):
        target.view("mlp.gate", Region((1, 0), (2, 3)))
    target.abandon()


def test_another_reload_in_progress_is_left_alone(names: VllmNames) -> None:
    """An engine that someone else is reloading is refused, and that reload can go on."""
    from vllm.model_executor.model_loader.reload import layerwise

    model = stub.started(stub.StubModel(mlp=stub.GateUp()), names, weights(1, 2))
    held = model.mlp.weight
    layerwise.initialize_layerwise_reload(model)
    with pytest.raises(TargetError, match=r"no memory|middle of another reload"):
        stub.target_of(model, names).manifest(0, stub.specs_of(weights(1, 2)))
    model.load_weights(iter(weights(3, 4).items()))
    layerwise.finalize_layerwise_reload(model, None)
    assert model.mlp.weight is held
    assert torch.equal(held, fused(weights(3, 4)))
