"""A script: trace vLLM's own loaders for every rank of an engine layout, in one process and without weights.

`python virtual_traces.py FOLDER`: for each case of `virtual_cases.CASES`, one JSON line with what each rank's loader
takes of each checkpoint tensor. Only the model is built; the groups that it asks for its place in the layout are
stand-ins, so that neither processes nor an engine are started.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from equipment.absent_packages import stand_in_for
from equipment.virtual_cases import CASES, TraceCase, model_of
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.targets.loader_trace import trace_loader


class StandInGroup:
    """What a model asks a process group while it is built: its size, and this rank's place in it."""

    def __init__(self, place: int, size: int) -> None:
        self.rank_in_group, self.world_size = place, size
        self.rank = self.local_rank = place
        self.ranks = list(range(size))
        self.is_first_rank, self.is_last_rank = place == 0, place == size - 1
        self.device_group = self.cpu_group = SimpleNamespace(size=lambda: size, rank=lambda: place)


@contextmanager
def placed(case: TraceCase, rank: int) -> Iterator[None]:
    """vLLM's parallel state as rank `rank` of the layout sees it."""
    from vllm.distributed import parallel_state

    engine, inside = divmod(rank, case.tp * case.pp)
    stage, part = divmod(inside, case.tp)
    grouped = case.ep > case.tp
    groups = {
        "_TP": StandInGroup(part, case.tp),
        "_PP": StandInGroup(stage, case.pp),
        "_DP": StandInGroup(engine, case.dp) if grouped else StandInGroup(0, 1),
        "_EP": StandInGroup(engine * case.tp + part, case.ep) if grouped else StandInGroup(part, case.tp),
        "_PCP": StandInGroup(0, 1),
        "_DCP": StandInGroup(0, 1),
        "_ETP": StandInGroup(0, 1),
        "_WORLD": StandInGroup(rank, case.world),
    }
    before = {name: getattr(parallel_state, name) for name in groups}
    for name, group in groups.items():
        setattr(parallel_state, name, group)
    try:
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


def trace_case(folder: Path, case: TraceCase, built: list[torch.nn.Module]) -> list[dict[str, Any]]:
    """For each rank: regions [offset, extent] by tensor, dtypes by tensor, and why tensors are indirect.

    The models are added to `built`, and must outlive all traces of the process.
    """
    specs = model_of(folder, case).specs
    return [_trace_rank(folder / case.name, case, rank, specs, built) for rank in range(case.world)]


def _trace_rank(
    folder: Path, case: TraceCase, rank: int, specs: tuple[TensorSpec, ...], built: list[torch.nn.Module]
) -> dict[str, Any]:
    """Build and trace one rank's model, which is added to `built`."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    grouped = case.ep > case.tp
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=64,
        tensor_parallel_size=case.tp,
        pipeline_parallel_size=case.pp,
        enable_expert_parallel=case.ep > 1,
        data_parallel_size=case.dp if grouped else 1,
        data_parallel_rank=rank // (case.tp * case.pp) if grouped else None,
        distributed_executor_backend="mp",
    )
    config = arguments.create_engine_config()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with placed(case, rank), set_current_vllm_config(config):
            model = initialize_model(config)
            built.append(model)
            names = dict(model.named_parameters(remove_duplicate=False))
            first = {id(tensor): name for name, tensor in reversed(names.items())}
            aliases = {name: first[id(tensor)] for name, tensor in names.items() if first[id(tensor)] != name}
            destinations = {name: tensor for name, tensor in names.items() if name not in aliases}
            trace = trace_loader(model.load_weights, specs, destinations, aliases, [], lambda name: False)
    finally:
        torch.set_default_dtype(torch.float32)
    return {
        "regions": {
            spec.name: [[list(shard.region.offset), list(shard.region.extent)] for shard in trace.shards_of(spec.name)]
            for spec in specs
        },
        "dtypes": dict(trace.dtypes),
        "indirect": dict(trace.indirect),
    }


def build_anything() -> None:
    """Let vLLM's CPU build make models that it could not run: loading needs neither towers nor kernels."""
    from transformers.models.auto import image_processing_auto  # noqa: F401  # it must find that torchvision is absent

    stand_in_for("torchvision")
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as plain_experts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.models import registry

    check: Any = FusedMoEConfig.__post_init__
    choose = plain_experts.select_unquantized_moe_backend

    def check_no_kernel(config: Any) -> None:
        with suppress(NotImplementedError):  # experts without a gate have no CPU kernel
            check(config)

    def choose_as_if_gated(moe_config: Any) -> Any:
        own, moe_config.activation = moe_config.activation, MoEActivation.SILU
        try:
            return choose(moe_config)
        finally:
            moe_config.activation = own

    FusedMoEConfig.__post_init__ = check_no_kernel  # type: ignore[method-assign]
    plain_experts.select_unquantized_moe_backend = choose_as_if_gated
    # What a model can do is asked in another process, which would not know the stand-ins.
    registry._run_in_subprocess = lambda ask: ask()


def main() -> None:
    """Trace every case; a failing one reports its error and the rest go on."""
    build_anything()
    folder, *chosen = sys.argv[1:]
    # Kept to the end: vLLM remembers by a model's `id` which layers its pipeline stage lacks, and does not forget when
    # the model goes; the next one may get the same id.
    built: list[torch.nn.Module] = []
    for case in CASES:
        if chosen and case.name not in chosen:
            continue
        try:
            found: dict[str, Any] = {"ranks": trace_case(Path(folder), case, built)}
        except Exception:
            found = {"error": traceback.format_exc()}
        sys.stdout.write("\nCASE " + json.dumps({"name": case.name, **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
