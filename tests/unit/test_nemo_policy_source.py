"""The source of a policy worker: whichever model it holds, and clear words where it holds none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from equipment.automodel_like import ComputingAdapter, Model, Named, SplitAdapter
from torch import nn

from nemo_rl_reshard.errors import DeclarationError, StateError
from nemo_rl_reshard.integrations.nemo_rl.policy_source import source_of_policy
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.sources.dtensor import DTensorSource


def _worker(model: object) -> SimpleNamespace:
    return SimpleNamespace(model=model, dtype=torch.bfloat16, cpu_offload=False, rank=0)


def _sent(source: DTensorSource) -> dict[str, torch.Tensor]:
    """Everything one lone rank would send, copied."""
    source.prepare()
    found = {shard.tensor: source.view(shard.tensor, shard.region).clone() for shard in source.manifest(0).shards}
    source.release()
    return found


def _stock(model: Model) -> dict[str, torch.Tensor]:
    """What NeMo RL would send, by its own order of things."""
    adapter = model.state_dict_adapter
    pairs: Named = []
    for name, value in model.state_dict().items():
        pairs += [(name, value)] if adapter is None else adapter.convert_single_tensor_to_hf(name, value)
    return {name: value.clone() for name, value in pairs}


@pytest.mark.parametrize("adapter", [None, SplitAdapter(), ComputingAdapter()], ids=["none", "boxes", "computing"])
def test_what_is_sent_is_what_nemo_rl_would_send(adapter: SplitAdapter | None) -> None:
    """B19 B53: names, values and buffers, before and after a step; masters stay fp32 whatever the worker's dtype."""
    model = Model(adapter)
    source = source_of_policy(_worker(model), 0)
    for _ in range(2):
        found, expected = _sent(source), _stock(model)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert {value.dtype for value in found.values()} == {torch.float32}
        model.step()


def test_only_what_is_computed_is_indirect() -> None:
    """B23: norms stored around zero and a scale of ones, with the reason; experts go straight."""
    manifest = source_of_policy(_worker(Model(ComputingAdapter())), 0).manifest(0)
    assert {name.rpartition("layers.")[2][2:]: reason for name, reason in manifest.indirect} == {
        "norm.weight": "ComputingAdapter: aten.add.Tensor computes with the tensor",
        "mlp.router.scale": "ComputingAdapter computes it",
    }
    shards = {shard.tensor: shard.view for shard in manifest.shards}
    up = shards["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert (up.storage, up.offset, up.stride) == ("model.layers.0.mlp.experts.gate_and_up_projs", 125, (1, 10))


def test_exports_exist_only_during_a_refit() -> None:
    source = source_of_policy(_worker(Model(ComputingAdapter())), 0)
    with pytest.raises(StateError, match=r"model\.layers\.0\.norm\.weight: it is made at the start of a refit"):
        source.view("model.layers.0.norm.weight", Region((0,), (12,)))
    source.prepare()
    with pytest.raises(DeclarationError, match=r"rank 0 holds no \(0,\)\+\(13,\) in one piece"):
        source.view("model.layers.0.norm.weight", Region((0,), (13,)))


def test_an_adapter_that_changes_its_mind_is_caught() -> None:
    """After the declaration the adapter makes a computed tensor under another name."""
    adapter = ComputingAdapter()
    source = source_of_policy(_worker(Model(adapter)), 0)
    adapter.made = lambda fqn, tensor: [(f"{fqn}.other", tensor)]  # type: ignore[method-assign]
    with pytest.raises(DeclarationError, match=r"norm\.weight: the adapter makes it otherwise than was declared"):
        source.prepare()


def test_wrapped_layers_reach_the_adapter_under_their_own_names() -> None:
    """B22: activation checkpointing and compilation insert path components that no checkpoint has."""
    adapter = SplitAdapter()
    model = Model(adapter)
    inner = model.model.layers[1]
    shell = nn.Module()
    shell._checkpoint_wrapped_module = inner
    model.model.layers[1] = shell
    source_of_policy(_worker(model), 0)
    assert "model.layers.1.mlp.experts.down_projs" in adapter.asked
    assert not any("wrapped" in name for name in adapter.asked)


@pytest.mark.parametrize("keys", [{"head.weight": "embed.weight"}, ["head.weight"], ["embed.weight", "head.weight"]])
def test_both_ways_of_naming_a_tie(keys: object) -> None:
    """B32: older model classes name the aliases alone, and both names may be in the list."""
    model = _Tied(keys)
    source = source_of_policy(_worker(model), 0)
    assert source.aliases == {"head.weight": "embed.weight"}
    assert [spec.name for spec in source.manifest(0).specs] == ["embed.weight"]
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(DeclarationError, match=r"head\.weight is tied to embed\.weight"):
        source_of_policy(_worker(model), 0)


class _Tied(nn.Module):
    def __init__(self, keys: object) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 2), nn.Linear(2, 6, bias=False)
        self.head.weight = self.embed.weight
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self._tied_weights_keys = keys

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


def test_a_tie_that_training_breaks_is_caught_at_the_refit() -> None:
    """B32: the tie held when it was declared; later the head has a life of its own."""
    model = _Tied({"head.weight": "embed.weight"})
    source = source_of_policy(_worker(model), 0)
    source.prepare()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    with pytest.raises(DeclarationError, match=r"head\.weight is tied to embed\.weight"):
        source.prepare()


def test_moved_parameters_are_found_where_they_went() -> None:
    """Offloading and onloading replace every storage; a view is of the present one, and no second copy is kept."""
    model = Model(SplitAdapter())
    source = source_of_policy(_worker(model), 0)
    _sent(source)
    model._apply(lambda tensor: tensor.detach().clone())
    for buffer in model.buffers():
        torch.utils.swap_tensors(buffer, buffer.clone())
    parameters = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    views = [source.view(shard.tensor, shard.region) for shard in source.manifest(0).shards]
    assert {view.untyped_storage().data_ptr() for view in views} == parameters


def test_a_worker_without_a_model_is_named() -> None:
    with pytest.raises(DeclarationError, match=r"SimpleNamespace of rank 5 holds no module in `model`"):
        source_of_policy(SimpleNamespace(), 5)
    with pytest.raises(DeclarationError, match="holds no module"):
        source_of_policy(_worker([nn.Linear(2, 2)]), 0)


def test_an_adapter_without_single_tensors_is_refused() -> None:
    with pytest.raises(DeclarationError, match="force_hf: true"):
        source_of_policy(_worker(Model(object())), 0)  # type: ignore[arg-type]
