"""`trace`: start a real engine and say where its own loader puts each checkpoint tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from nemo_rl_reshard.cli.requirements import require
from nemo_rl_reshard.cli.stable_json import write_json
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.params.shard import StorageView
from nemo_rl_reshard.params.spec import TensorSpec

_SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Landing:
    """Where one region of a checkpoint tensor lands on one rank: both boxes as [start, stop] per dim.

    `box` is in the parameter as the loader sees it. A tensor that the loader does not just copy has no boxes, and
    `reason` says why. `mode` is how the layer is written: `live` in place, `packed` through the engine's own
    post-load processing.
    """

    tensor: str
    rank: int
    region: list[list[int]] | None
    parameter: str
    box: list[list[int]] | None
    mode: str
    reason: str


def run_trace(
    model_dir: Path, tp: int, json_file: Path | None, console: Console, *, expert_parallel: bool = False
) -> None:
    """Trace, print, and write JSON if asked.

    Raises ConfigError if MODEL_DIR is no checkpoint, EnvironmentLacksError without vLLM, TargetError if the engine
    cannot be refitted.
    """
    specs = read_checkpoint_specs(model_dir)
    require("torch", "vllm")
    with console.status(f"starting an engine on {tp} rank{'s' if tp > 1 else ''}"):
        landings = _trace(model_dir, specs, tp, expert_parallel)
    if json_file is not None:
        plain = {"schema": 1, "tp": tp, "landings": [asdict(landing) for landing in landings]}
        write_json(json_file, plain)
    _print(specs, landings, console)


def read_checkpoint_specs(model_dir: Path) -> list[TensorSpec]:
    """Names, shapes and dtypes of all tensors in a folder of safetensors files, read from the headers alone."""
    if not (model_dir / "config.json").is_file():
        raise ConfigError(f"MODEL_DIR {model_dir}: has no config.json, so it is no checkpoint folder")
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"MODEL_DIR {model_dir}: has no safetensors file")
    return [spec for file in files for spec in _read_header(file)]


def _read_header(file: Path) -> Iterable[TensorSpec]:
    """A safetensors file starts with the length of a JSON header, little-endian, and the header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_HEADER_LENGTH_BYTES), "little")
            header: Mapping[str, Any] = json.loads(stream.read(length))
        return [
            TensorSpec(name, tuple(entry["shape"]), _SAFETENSORS_DTYPES[entry["dtype"]])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise ConfigError(f"{file}: is no safetensors file that can be refitted: {fault!r}") from fault


def _trace(model_dir: Path, specs: Sequence[TensorSpec], tp: int, expert_parallel: bool) -> list[Landing]:
    # vLLM reads these while it is imported; what the user set stays.
    import torch

    settings = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not torch.cuda.is_available():
        from nemo_rl_reshard.orchestration.cpu_environment import CpuEnvironment

        settings |= CpuEnvironment().variables()
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    engine = LLM(
        model=str(model_dir),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        disable_log_stats=True,
        max_model_len=64,
        tensor_parallel_size=tp,
        distributed_executor_backend="uni" if tp == 1 else "mp",
        enable_expert_parallel=expert_parallel,
    )
    plain = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
    found = engine.collective_rpc(trace_worker, args=(plain,))
    return [Landing(**landing) for per_rank in found for landing in per_rank]


def trace_worker(worker: Any, plain: list[list[Any]]) -> list[dict[str, Any]]:
    """Runs inside an engine worker: where each of the checkpoint tensors lands on it, as JSON types."""
    from nemo_rl_reshard.targets.worker_extension import target_of_worker

    specs = [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in plain]
    target = target_of_worker(worker)
    manifest = target.manifest(int(worker.rank), specs)
    modes, layouts = target.modes, target.trace.layouts
    landings = [
        Landing(
            tensor=shard.tensor,
            rank=manifest.rank,
            region=[list(edges) for edges in zip(shard.region.offset, shard.region.stop, strict=True)],
            parameter=shard.view.storage,
            box=parameter_box(shard.view, layouts[shard.view.storage].stride),
            mode=_mode(modes, shard.view.storage),
            reason="",
        )
        for shard in manifest.shards
    ]
    for tensor, reason in manifest.indirect:
        landings += [
            Landing(tensor, manifest.rank, None, storage, None, _mode(modes, storage), reason)
            for storage in sorted(target.trace.loader.feeds[tensor])
        ]
    return [asdict(landing) for landing in landings]


def parameter_box(view: StorageView, stride: Sequence[int]) -> list[list[int]]:
    """The box that `view` is in a parameter of these strides, as [start, stop] per dim of the parameter.

    A parameter may have more dims than the tensor (an expert's index) or the same in another order (transposed).
    """
    extents = {step: size for step, size in zip(view.stride, view.extent, strict=True) if size > 1}
    starts: dict[int, int] = {}
    rest = view.offset
    for dim in sorted(range(len(stride)), key=lambda dim: -stride[dim]):
        starts[dim], rest = divmod(rest, stride[dim])
    return [[starts[dim], starts[dim] + extents.get(step, 1)] for dim, step in enumerate(stride)]


def _mode(modes: Mapping[str, Any], storage: str) -> str:
    found = modes.get(storage.rpartition(".")[0])
    return str(found.mode) if found is not None else ""


def _print(specs: Sequence[TensorSpec], landings: Sequence[Landing], console: Console) -> None:
    """One tensor after the other in checkpoint order, a line per region and rank; lines are not wrapped."""
    by_tensor: dict[str, list[Landing]] = {}
    for landing in landings:
        by_tensor.setdefault(landing.tensor, []).append(landing)
    for spec in specs:
        shape = "x".join(map(str, spec.shape)) or "scalar"
        console.print(f"[bold]{escape(spec.name)}[/bold] {shape} {spec.dtype}", soft_wrap=True, highlight=False)
        found = by_tensor.get(spec.name)
        if found is None:
            console.print("  nowhere: the loader takes it and writes nothing", highlight=False)
            continue
        for landing in found:
            way = f"by the engine's loader: {landing.reason}" if landing.reason else landing.mode
            region = _box_text(landing.region) or "all of it"
            place = f"{landing.parameter} {_box_text(landing.box)}".rstrip()
            line = f"  rank {landing.rank}: {region} -> {place}  ({way})"
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    loaded = {landing.tensor for landing in landings if landing.reason}
    copied = by_tensor.keys() - loaded
    console.print(
        f"{len(specs)} tensors: {len(copied)} copied region by region, {len(loaded)} through the engine's loader, "
        f"{len(specs) - len(by_tensor)} nowhere",
        highlight=False,
    )


def _box_text(box: Sequence[Sequence[int]] | None) -> str:
    return "" if box is None else "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
