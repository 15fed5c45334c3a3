"""VllmTarget when even the way back from a failed refit fails: loud, durable, and only for the layers concerned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.layout import Region

pytest.importorskip("vllm", exc_type=ImportError)

from equipment import stub_engine as stub


def upside_down(layer: nn.Module) -> None:
    """A post-load step that shows in the weights."""
    layer.weight.data = layer.weight.data.flip(0)


def test_an_engine_that_cannot_be_put_back_is_never_trusted_again() -> None:
    """Two layers are open and one refuses its old tensors: the other gets them, and every later call says why."""
    names = stub.vllm_names()
    stuck: list[nn.Module] = []

    def place(module: nn.Module, record: Any) -> None:
        if module in stuck:
            raise RuntimeError("no memory left")
        names.place_kernel_tensors(module, record)

    first = {f"{layer}.{part}": torch.arange(6.0).view(2, 3) for layer in ("one", "two") for part in ("gate", "up")}
    layers = {layer: stub.GateUp(method=stub.post_load(names, upside_down)) for layer in ("one", "two")}
    model = stub.started(stub.StubModel(**layers), names, first)
    target = stub.target_of(model, replace(names, place_kernel_tensors=place), "packed")
    target.manifest(0, stub.specs_of(first))
    held = model.two.weight
    target.begin(1)
    for layer in ("one", "two"):
        target.view(f"{layer}.gate", Region((0, 0), (2, 3))).fill_(99)
    stuck.append(model.one)

    target.abandon()

    assert model.two.weight is held
    for call in (lambda: target.begin(2), lambda: target.manifest(0, stub.specs_of(first))):
        with pytest.raises(TargetError, match=r"restart the engine.*\n.*layer one: RuntimeError: no memory left"):
            call()
    another = stub.target_of(model, names)
    with pytest.raises(TargetError, match="a refit that could not be undone"):
        another.manifest(0, stub.specs_of(first))
