"""NeMo Automodel's real state-dict adapters, where its package can be imported: learnt boxes against what they make."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.sources.adapter_map import AdapterMap, Unproven
from nemo_rl_reshard.sources.naming import Piece

pytestmark = [
    pytest.mark.skipif(
        find_spec("nemo_automodel") is None, reason="needs nemo_automodel on PYTHONPATH, as make test-nemo-rl has it"
    ),
    pytest.mark.filterwarnings("ignore"),  # of its own imports
]

EXPERTS, HIDDEN, INTER = 3, 8, 5
MODELS = "nemo_automodel.components.models"
CASES = {
    "qwen3_moe.Qwen3MoeStateDictAdapter": "model.layers.1.mlp.experts",
    "qwen3_next.Qwen3NextStateDictAdapter": "model.layers.1.mlp.experts",
    "qwen3_5_moe.Qwen3_5MoeStateDictAdapter": "model.language_model.layers.1.mlp.experts",
    "qwen3_vl_moe.Qwen3VLMoeStateDictAdapter": "model.language_model.layers.1.mlp.experts",
    "qwen3_omni_moe.Qwen3OmniMoeStateDictAdapter": "model.layers.1.mlp.experts",
    "deepseek_v3.DeepSeekV3StateDictAdapter": "model.layers.1.mlp.experts",
    "glm4_moe.Glm4MoeStateDictAdapter": "model.layers.1.mlp.experts",
    "gpt_oss.GPTOSSStateDictAdapter": "model.layers.1.mlp.experts",
    "minimax_m2.MiniMaxM2StateDictAdapter": "model.layers.1.mlp.experts",
    "nemotron_v3.NemotronV3StateDictAdapter": "model.layers.1.mixer.experts",
    "step3p5.Step3p5StateDictAdapter": "model.layers.1.moe.experts",
    "mistral4.Mistral4StateDictAdapter": "model.layers.1.mlp.experts",
    "gemma4_moe.Gemma4MoEStateDictAdapter": "model.language_model.layers.1.moe.experts",
}
"""Adapter, and where its model keeps stacked experts."""


def _adapter(case: str) -> Any:
    module, _, name = case.partition(".")
    moe = SimpleNamespace(n_routed_experts=EXPERTS, moe_inter_dim=INTER, expert_activation="swiglu")
    kind = getattr(import_module(f"{MODELS}.{module}.state_dict_adapter"), name)
    return kind(
        SimpleNamespace(), moe, SimpleNamespace(attn="sdpa", dispatcher="torch", experts="torch"), dtype=torch.float32
    )


def _tensors(path: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{path}.gate_and_up_projs": (EXPERTS, HIDDEN, 2 * INTER),
        f"{path}.down_projs": (EXPERTS, INTER, HIDDEN),
        f"{path.partition('.layers')[0]}.layers.1.self_attn.q_proj.weight": (4, HIDDEN),
        f"{path.partition('.layers')[0]}.embed_tokens.weight": (11, HIDDEN),
        "lm_head.weight": (11, HIDDEN),
    }


@pytest.mark.parametrize("case", CASES)
def test_every_element_is_where_the_real_adapter_puts_it(case: str) -> None:
    """B19 B23: names, shapes and elements; only a tensor made of nothing (a scale of ones) is left to the adapter."""
    adapter = _adapter(case)
    learner = AdapterMap(adapter)
    for name, shape in _tensors(CASES[case]).items():
        counted = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        made = dict(adapter.convert_single_tensor_to_hf(name, counted, exclude_key_regex="x^", quantization=False))
        learnt = learner.learn(name, shape, torch.float32)
        assert [found.name for found in learnt] == list(made)
        for found in learnt:
            if isinstance(found, Unproven):
                assert found.name.endswith("per_expert_scale"), found
                assert torch.equal(made[found.name], torch.ones(EXPERTS))
                continue
            assert torch.equal(_shown(found, counted), made[found.name]), found


def _shown(piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    rest = [dim for dim in range(whole.ndim) if dim not in piece.dims]
    return whole[piece.box.slices].permute(*piece.dims, *rest).reshape(piece.shape)


def test_a_whole_30b_a3b_layer_is_learnt_at_its_real_size() -> None:
    """128 experts of 768 rows and a hidden size of 2048: 2.4 GiB of fp32 masters that are never made."""
    adapter = _adapter("qwen3_moe.Qwen3MoeStateDictAdapter")
    adapter.moe_config.n_routed_experts, adapter.moe_config.moe_inter_dim = 128, 768
    path = "model.layers.0.mlp.experts"
    learnt = AdapterMap(adapter).learn(f"{path}.gate_and_up_projs", (128, 2048, 1536), torch.float32)
    assert len(learnt) == 256
    assert learnt[-1] == Piece(f"{path}.127.up_proj.weight", Region((127, 0, 768), (1, 2048, 768)), (2, 1))


def test_lora_layers_of_the_real_class_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """B58: `patch_linear_module` changes the class of a layer in place; it is known by its base class."""
    # Its own kernels, which nothing here runs, need the one triton release that it pins.
    kernels = dict.fromkeys(("lora_da_dx_update_wrapper", "lora_db_update_wrapper", "lora_forward_wrapper"))
    monkeypatch.setitem(sys.modules, "nemo_automodel.components._peft.lora_kernel", SimpleNamespace(**kernels))
    lora = import_module("nemo_automodel.components._peft.lora")
    from nemo_rl_reshard.sources.dtensor import DTensorSource

    layer = lora.patch_linear_module(torch.nn.Linear(6, 4, bias=False), dim=2, alpha=5, use_triton=False)
    torch.nn.init.normal_(layer.lora_B.weight)
    source = DTensorSource.from_model(layer, 0)
    source.prepare()
    with torch.no_grad():
        expected = layer.weight + torch.matmul(layer.lora_B.weight, layer.lora_A.weight) * 2.5
    assert torch.equal(source.view("weight", Region((0, 0), (4, 6))), expected)
