"""A model's checkpoint names and shapes from its Hugging Face configuration: built by transformers, without weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from nemo_rl_reshard.cli.requirements import require
from nemo_rl_reshard.cli.spec_fields import Fields, nearest
from nemo_rl_reshard.cli.spec_text import read_plain
from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.params.dtype import ITEM_SIZE
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.virtual.model import ModelShape

_Shapes = dict[str, tuple[int, ...]]

_LAYER = re.compile(r"^(.*?\blayers\.)(\d+)(\..+)$")
_NUMBER = re.compile(r"\.(\d+)\.")
_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that need code from elsewhere, and the type of transformers' own that has the same tensors."""
_NOT_SHAPES = ("assumptions", "auto_map", "quantization_config", "architectures", "transformers_version", "dtype")


def preset_names() -> list[str]:
    """Names of the models that come with the package."""
    folder = files("nemo_rl_reshard") / "presets" / "models"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_model(plain: Mapping[str, Any]) -> ModelShape:
    """The model of `{preset: NAME}` or `{hf_config: PATH}`; `dtype` is what travels, bfloat16 unless given.

    Of a model with towers only the language model is read. Raises ConfigError listing every fault, and
    EnvironmentLacksError without transformers.
    """
    faults = FaultList("model", ConfigError)
    fields = Fields(plain, "model", faults, ("preset", "hf_config", "dtype"))
    dtype = plain.get("dtype", "bfloat16")
    if dtype not in ITEM_SIZE:
        fields.fault(f"unknown dtype {dtype!r}; {nearest(str(dtype), ITEM_SIZE)}", "dtype")
    name, config = _read_config(fields)
    if config is not None and not isinstance(config.get("model_type"), str):
        faults.add(f"model {name}: its configuration has no model_type, so it cannot be built")
    faults.raise_if_any()
    assert config is not None
    require("torch", "transformers")
    return _shape_of(name, config, dtype)


def _read_config(fields: Fields) -> tuple[str, Mapping[str, Any] | None]:
    """Name and configuration as given, or None with faults noted."""
    given = [key for key in ("preset", "hf_config") if key in fields]
    if len(given) != 1:
        fields.fault(f"give one of preset and hf_config; got {' and '.join(given) or 'neither'}")
        return "", None
    value = fields.plain[given[0]]
    if not isinstance(value, str):
        fields.fault(f"{value!r} is not text", given[0])
        return "", None
    if given == ["hf_config"]:
        path = Path(value)
        name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    elif value in preset_names():
        path = Path(str(files("nemo_rl_reshard") / "presets" / "models" / f"{value}.json"))
        name = value
    else:
        fields.fault(f"unknown preset {value!r}; {nearest(value, preset_names())}", "preset")
        return value, None
    try:
        config, repeated = read_plain(path)
    except ConfigError as fault:
        fields.fault(str(fault), given[0])
        return name, None
    for sentence in repeated:
        fields.fault(f"{path}: {sentence}", given[0])
    if not isinstance(config, dict):
        fields.fault(f"{path}: is no mapping, as a model's configuration is", given[0])
        return name, None
    return name, config


def _shape_of(name: str, plain: Mapping[str, Any], dtype: str) -> ModelShape:
    """Build the model on the meta device and read it off."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    assumptions = list(plain.get("assumptions", ()))
    text = plain.get("text_config")
    if isinstance(text, Mapping):
        assumptions.append("the language model alone: towers and projectors are left out")
        plain = {"tie_word_embeddings": plain.get("tie_word_embeddings", False), **text}
    model_type = str(plain["model_type"])
    numbers = {key: value for key, value in plain.items() if key not in (*_NOT_SHAPES, "model_type")}
    build: Any = AutoModelForCausalLM.from_config
    try:
        config = AutoConfig.for_model(_SAME_AS.get(model_type, model_type), **numbers)
        with torch.device("meta"):
            model = build(config)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as fault:
        raise ConfigError(f"model {name}: transformers cannot build a {model_type}: {fault}") from fault
    specs = tuple(TensorSpec(found, shape, dtype) for found, shape in checkpoint_shapes(model).items())
    return ModelShape(name, type(model).__name__, specs, config.to_dict(), tuple(assumptions))


def checkpoint_shapes(model: Any) -> _Shapes:
    """Names and shapes as `model.save_pretrained` would write them, in model order, experts one by one.

    Layers that are alike are converted once. Tied tensors appear once, as in a checkpoint.
    """
    held = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    saved = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    groups: dict[tuple[str, str], _Shapes] = {}
    for name, shape in saved.items():
        if name in held or name in buffers:
            match = _LAYER.match(name)
            prefix, layer, rest = match.groups() if match else (name, "", "")
            groups.setdefault((prefix, layer), {})[rest] = shape
    known: dict[tuple[Any, ...], list[tuple[str, tuple[int, ...]]]] = {}
    found: _Shapes = {}
    for (prefix, layer), shapes in groups.items():
        kind = (prefix, *shapes.items())
        if kind not in known:
            known[kind] = _converted(model, prefix, layer, shapes)
        for pattern, shape in known[kind]:
            found[pattern.replace("{layer}", layer)] = shape
    return found


def _converted(model: Any, prefix: str, layer: str, shapes: _Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """Checkpoint names, with the layer's number left open, and shapes of one layer or one tensor outside layers."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {f"{prefix}{layer}{rest}": torch.empty(shape, device="meta") for rest, shape in shapes.items()}
    reverted = revert_weight_conversion(model, tensors)
    originals = list(shapes)
    rows = []
    for position, (name, tensor) in enumerate(reverted.items()):
        match = _LAYER.match(name)
        rest = match[3] if match else ""
        expert = _NUMBER.search(rest.partition("experts")[2])
        origin = max(range(len(originals)), key=lambda index: (_alike(originals[index], rest), -index))
        open_name = f"{match[1]}{{layer}}{rest}" if match else name
        rows.append(((origin, int(expert[1]) if expert else -1, position), open_name, tuple(tensor.shape)))
    return [(name, shape) for _, name, shape in sorted(rows)]


def _alike(one: str, other: str) -> int:
    """Length of the common beginning of two names."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
