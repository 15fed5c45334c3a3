"""VllmTarget.load on toy models: loaders that defer, that want tensors together, and tied parameters."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.targets.vllm_compat import VllmNames

pytest.importorskip("vllm", exc_type=ImportError)

from equipment import stub_engine as stub


@pytest.fixture(scope="module")
def names() -> VllmNames:
    return stub.vllm_names()


class Deferring(stub.StubModel):
    """Keeps what it is given and writes only when everything has arrived."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__(**layers)
        self.kept: list[tuple[str, torch.Tensor]] = []

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.kept.extend(named)
        if len(self.kept) < 3:
            return set()
        kept, self.kept = self.kept, []
        return super().load_weights(kept)


def test_a_deferring_loader_gets_what_was_sent_b44(names: VllmNames) -> None:
    """B44: three tensors through two buffers; one that the loader still holds is left to it, as the runtime does."""
    sent = [f"{name}.weight" for name in ("a", "b", "c")]
    first = {name: torch.zeros(4) for name in sent}
    model = stub.started(Deferring(a=stub.Plain(4), b=stub.Plain(4), c=stub.Plain(4)), names, first)
    target = stub.target_of(model, names)
    target.manifest(0, stub.specs_of(first))
    for version in (1, 2):
        buffers = [torch.empty(4), torch.empty(4)]
        target.begin(version)
        for turn, name in enumerate(sent):
            alone = torch._C._storage_Use_Count(buffers[turn % 2].untyped_storage()._cdata)
            buffers[turn % 2].fill_(10 * version + turn)
            target.load([(name, buffers[turn % 2].view(4))])
            if torch._C._storage_Use_Count(buffers[turn % 2].untyped_storage()._cdata) > alone:
                buffers[turn % 2] = torch.empty(4)
        target.finish(version)
        held = [model.get_submodule(name).weight[0].item() for name in ("a", "b", "c")]
        assert held == [10.0 * version, 10.0 * version + 1, 10.0 * version + 2]


class Joining(stub.StubModel):
    """Needs both parts of one weight in the same call."""

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parts = dict(named)
        if not parts.keys() & {"part.0", "part.1"}:
            return super().load_weights(parts.items())
        self.whole.weight.data.copy_(torch.cat([parts.pop("part.0"), parts.pop("part.1")]))
        return {"whole.weight"} | super().load_weights(parts.items())


def test_a_group_reaches_the_loader_in_one_call(names: VllmNames) -> None:
    """B57's kind: parts in different buckets wait for each other."""
    first = {"part.0": torch.zeros(2), "norm.weight": torch.zeros(3), "part.1": torch.zeros(1)}
    model = stub.started(Joining(whole=stub.Plain(3), norm=stub.Plain(3)), names, first)
    target = stub.target_of(model, names)
    manifest = target.manifest(0, stub.specs_of(first))
    assert {name for name, _ in manifest.indirect} == {"part.0", "part.1"}
    for version in (1.0, 2.0):
        wanted = {
            "part.0": torch.tensor([1.0, 2.0]) * version,
            "norm.weight": torch.arange(3.0) * version,
            "part.1": torch.tensor([3.0]) * version,
        }
        stub.refit(target, wanted, int(version))
        assert torch.equal(model.whole.weight, torch.tensor([1.0, 2.0, 3.0]) * version)
        assert torch.equal(model.norm.weight, wanted["norm.weight"])


def tied_model(names: VllmNames) -> nn.Module:
    model = stub.StubModel(embed=stub.Plain(3, 2), head=stub.Plain(3, 2))
    model.head.weight = model.embed.weight

    def load_weights(named: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return stub.StubModel.load_weights(model, ((n, t) for n, t in named if n != "head.weight"))

    model.load_weights = load_weights
    return stub.started(model, names, {"embed.weight": torch.zeros(3, 2)})


def test_tied_tensors_that_agree_are_taken_b34(names: VllmNames) -> None:
    both = {name: torch.arange(6.0).view(3, 2) for name in ("embed.weight", "head.weight")}
    model = tied_model(names)
    target = stub.target_of(model, names)
    manifest = target.manifest(0, stub.specs_of(both))
    assert [name for name, _ in manifest.indirect] == ["head.weight"]
    stub.refit(target, both, 1)
    assert torch.equal(model.head.weight, both["embed.weight"])
    assert model.head.weight is model.embed.weight


def test_tied_tensors_that_differ_are_an_error_b33(names: VllmNames) -> None:
    """B33: never silently dropped."""
    both = {"embed.weight": torch.arange(6.0).view(3, 2), "head.weight": torch.ones(3, 2)}
    target = stub.target_of(tied_model(names), names)
    target.manifest(0, stub.specs_of(both))
    target.begin(1)
    stub.write(target, both)
    with pytest.raises(TargetError, match=r"head.weight differs from embed.weight"):
        target.finish(1)
