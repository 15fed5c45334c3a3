"""Leftovers in pieces: where they are written, when the loader gets them, and what they hold meanwhile. B39 B44."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.runtime.whole_tensors import WholeTensors

NORM, HEAD, EMPTY, SCALE = "model.norm.weight", "lm_head.weight", "model.none.weight", "model.scale"
SPECS = [
    TensorSpec(NORM, (4,), "float32"),
    TensorSpec(HEAD, (6, 2), "bfloat16"),
    TensorSpec(EMPTY, (0, 2), "float32"),
    TensorSpec(SCALE, (), "float32"),
]


class Target:
    """Notes what it is told; direct tensors live in `held`."""

    def __init__(self) -> None:
        self.held = torch.zeros(3)
        self.done: list[str] = []
        self.loads: list[dict[str, Tensor]] = []

    def view(self, tensor: str, region: Region) -> Tensor:
        return self.held[region.slices]

    def tensor_done(self, tensor: str) -> None:
        self.done.append(tensor)

    def load(self, named: Any) -> None:
        self.loads.append(dict(named))


def write(whole: WholeTensors, spec: TensorSpec, version: int) -> Tensor:
    """Write `spec` row by row, as messages bring it."""
    values = (torch.arange(spec.numel, dtype=torch.float32) + 100 * version).reshape(spec.shape)
    values = values.to(getattr(torch, spec.dtype))
    regions = Region.whole(spec.shape).split(0, 2) if spec.shape else (Region.whole(()),)
    for region in regions:
        whole.view(spec.name, region).copy_(values[region.slices])
    whole.tensor_done(spec.name)
    return values


@pytest.mark.parametrize(("batch_bytes", "batches"), [(1, 4), (1 << 20, 1)])
def test_the_loader_gets_each_leftover_whole_in_batches_and_again_in_the_next_refit(batch_bytes, batches):
    target = Target()
    whole = WholeTensors(target, SPECS, torch.device("cpu"), batch_bytes)
    kept: list[tuple[Tensor, Tensor]] = []
    for version in (1, 2):
        target.loads.clear()
        whole.begin()
        written = {spec.name: write(whole, spec, version) for spec in SPECS if spec.numel}
        loaded = {name: tensor for load in target.loads for name, tensor in load.items()}
        assert len(target.loads) <= batches
        assert loaded.keys() == {spec.name for spec in SPECS}
        assert loaded[EMPTY].shape == (0, 2)
        kept += [(loaded[name], values) for name, values in written.items()]
        assert all(torch.equal(found, values) for found, values in kept), "what a loader keeps is never written again"


def test_direct_tensors_pass_through_and_memory_is_counted():
    target = Target()
    whole = WholeTensors(target, SPECS[:2], torch.device("cpu"), 1 << 20)
    whole.begin()
    whole.view("model.layers.0.mlp.up_proj.weight", Region((1,), (2,))).fill_(7)
    whole.tensor_done("model.layers.0.mlp.up_proj.weight")
    assert target.held.tolist() == [0, 7, 7]
    assert target.done == ["model.layers.0.mlp.up_proj.weight"]
    assert whole.peak_bytes == 0
    write(whole, SPECS[0], 1)
    assert (whole.peak_bytes, target.loads) == (16, []), "it waits for the others"
    write(whole, SPECS[1], 1)
    assert whole.peak_bytes == 16 + 24
    assert len(target.loads) == 1


def test_what_a_failed_refit_left_is_dropped_and_a_late_write_is_refused():
    target = Target()
    whole = WholeTensors(target, SPECS[:2], torch.device("cpu"), 1 << 20)
    whole.begin()
    write(whole, SPECS[0], 1)
    with pytest.raises(PlanError, match="after it was complete"):
        whole.view(NORM, Region((0,), (1,)))
    whole.begin()
    for spec in SPECS[:2]:
        write(whole, spec, 2)
    (loaded,) = target.loads
    assert loaded[NORM].tolist() == [200, 201, 202, 203]
