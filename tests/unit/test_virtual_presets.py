"""Models from configurations: checkpoint names as transformers saves them, presets of the published sizes."""

from __future__ import annotations

import json

import pytest
import transformers
from equipment.virtual_cases import CASES, model_of

from nemo_rl_reshard.cli.hf_model import preset_names, read_model
from nemo_rl_reshard.cli.run_trace import read_checkpoint_specs
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.params.classify import ClassKind, classify
from nemo_rl_reshard.virtual.roles import roles_of

FAMILIES = {case.family: case for case in CASES}
PUBLISHED = {
    "qwen3-4b": (8.04e9, 0.002),
    "qwen3-32b": (65.5e9, 0.002),
    "qwen3-30b-a3b": (61.06e9, 0.002),
    "qwen3-235b-a22b": (470.2e9, 0.001),
    "qwen3.5-397b": (794e9, 0.005),
    "deepseek-v3": (1342e9, 0.001),
    "kimi-k2": (2.05e12, 0.01),
    "nemotron-ultra-550b": (1.10e12, 0.01),
    "qwen3.8-2.4t": (4.8e12, 0.01),
    "kimi-k3-2.8t": (5.6e12, 0.01),
}
STAND_INS = {"nemotron-ultra-550b", "qwen3.8-2.4t", "kimi-k3-2.8t"}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_a_saved_checkpoint_b21(family, tmp_path):
    """B21: experts one by one, tied weights once, layers of several kinds, renamed trunks."""
    case = FAMILIES[family]
    shape = model_of(tmp_path, case)
    config = transformers.AutoConfig.from_pretrained(tmp_path / case.name)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    saved = {spec.name: spec.shape for spec in read_checkpoint_specs(tmp_path / "saved")}
    assert {spec.name: spec.shape for spec in shape.specs} == saved
    assert {spec.dtype for spec in shape.specs} == {"bfloat16"}


def test_every_preset_is_known_here():
    assert preset_names() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_bytes(name):
    nbytes, tolerance = PUBLISHED[name]
    model = read_model({"preset": name})
    assert model.nbytes == pytest.approx(nbytes, rel=tolerance)
    assert len(roles_of(model)) == len(model.specs)
    assert any(text.startswith("synthetic stand-in") for text in model.assumptions) == (name in STAND_INS)


def test_deepseek_v3_has_44553_feed_forward_and_expert_tensors():
    model = read_model({"preset": "deepseek-v3"})
    found = [spec for spec in model.specs if classify(spec.name, model.architecture).kind is ClassKind.FEED_FORWARD]
    assert len(found) == 44_553
    assert not any("layers.61." in spec.name for spec in model.specs)


def test_tensors_come_in_model_order():
    names = [spec.name for spec in read_model({"preset": "qwen3-30b-a3b"}).specs]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in names[1:-2]]
    assert layers == sorted(layers)
    experts = [int(name.split(".")[5]) for name in names if name.startswith("model.layers.7.mlp.experts.")]
    assert experts == sorted(experts)


def test_of_a_model_with_towers_the_language_model_is_read(tmp_path):
    text = json.loads(json.dumps(read_model({"preset": "qwen3-4b"}).config, default=str)) | {"num_hidden_layers": 1}
    text.pop("layer_types", None)
    path = tmp_path / "towers.json"
    path.write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text, "vision_config": {"depth": 3}}))
    model = read_model({"hf_config": str(path), "dtype": "float32"})
    assert model.name == "towers"
    assert model.assumptions == ("the language model alone: towers and projectors are left out",)
    assert {spec.dtype for spec in model.specs} == {"float32"}


def test_faults_are_named(tmp_path):
    with pytest.raises(ConfigError, match="unknown preset 'deepseek-v2'; did you mean 'deepseek-v3'"):
        read_model({"preset": "deepseek-v2"})
    with pytest.raises(ConfigError) as caught:
        read_model({"preset": "qwen3-4b", "hf_config": "x.json", "dtype": "bf16", "layers": 3})
    for part in ("unknown key 'layers'", "give one of preset and hf_config", "model.dtype: unknown dtype 'bf16'"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"absent.json: cannot be read"):
        read_model({"hf_config": str(tmp_path / "absent.json")})
    (tmp_path / "odd.json").write_text('{"model_type": "no_such_model", "hidden_size": 4}')
    with pytest.raises(ConfigError, match="model odd: transformers cannot build a no_such_model"):
        read_model({"hf_config": str(tmp_path / "odd.json")})
    (tmp_path / "empty.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no model_type"):
        read_model({"hf_config": str(tmp_path / "empty.json")})
