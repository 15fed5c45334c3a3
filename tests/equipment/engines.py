"""Real vLLM CPU engines for tests: start one, drive its targets from whole tensors, compare it with a fresh one."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from equipment.checkpoints import read_weights
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.targets.vllm_target import VllmTarget
from nemo_rl_reshard.targets.worker_extension import target_of_worker

PLUGIN = Path(__file__).parents[2] / "examples" / "cpu_engine"
PROMPTS = ([1, 2, 3, 4], [9, 8, 7], [499, 0, 250])


def environment(*, live: bool) -> dict[str, str]:
    """Variables under which the engine starts; they must be set before vLLM is imported."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "CPU_ENGINE_LIVE_WEIGHTS": "1" if live else "0",
        "PYTHONPATH": os.pathsep.join([str(PLUGIN), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }


@contextmanager
def engine(checkpoint: Path, tensor_parallel: int = 1, **options: Any) -> Iterator[Any]:
    """A `vllm.LLM` on `checkpoint`; in this process for one rank, worker processes for more."""
    from vllm import LLM

    llm = LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=options.pop("max_model_len", 128),
        dtype=options.pop("dtype", "auto"),
        disable_log_stats=True,
        tensor_parallel_size=tensor_parallel,
        distributed_executor_backend="uni" if tensor_parallel == 1 else "mp",
        worker_extension_cls="equipment.engines.TargetWorker",
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        _forget_parallel_state()


def greedy(llm: Any, prompts: Sequence[Sequence[int]] = PROMPTS, num_tokens: int = 12) -> list[list[int]]:
    """Token ids of greedy continuations."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=num_tokens, temperature=0, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], wanted, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def refit_from(target: VllmTarget, weights: Mapping[str, torch.Tensor], version: int, leftovers: Sequence[str]) -> None:
    """Play the runtime on one rank: write every declared region in two halves, hand `leftovers` to the loader."""
    loader = target.trace.loader
    target.begin(version)
    direct = [name for name in weights if loader.shards_of(name) and name not in leftovers]
    for name in direct:
        for shard in loader.shards_of(name):
            for part in _halves(shard.region):
                view = target.view(name, part)
                view.copy_(weights[name][part.slices])
        target.tensor_done(name)
    rest = [name for name in weights if name not in direct]
    for start in range(0, len(rest), 3):
        target.load([(name, weights[name]) for name in rest[start : start + 3]])
    target.finish(version)


def specs_of(weights: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """What a trainer that holds `weights` would declare."""
    return [TensorSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]


class TargetWorker:
    """Mixed into vLLM's workers: a target driven from a checkpoint folder. JSON types in and out."""

    rank: int

    def declare(self, checkpoint: str, mode: str) -> dict[str, Any]:
        """Trace and declare; the manifest as plain values, with how each layer is written."""
        self.reshard_target = target_of_worker(self, mode)
        manifest = self.reshard_target.manifest(self.rank, specs_of(read_weights(Path(checkpoint))))
        modes = {layer: [str(found.mode), found.reason] for layer, found in self.reshard_target.modes.items()}
        return {"manifest": manifest.to_plain(), "modes": modes, "seconds": self.reshard_target.trace.loader.seconds}

    def refit(self, checkpoint: str, version: int, leftovers: list[str]) -> dict[str, Any]:
        """One refit to the checkpoint's weights; names ending in one of `leftovers` go through the loader."""
        weights = read_weights(Path(checkpoint))
        chosen = [name for name in weights if name.endswith(tuple(leftovers))] if leftovers else []
        refit_from(self.reshard_target, weights, version, chosen)
        return {"version": self.reshard_target.version, "peak_extra_bytes": self.reshard_target.peak_extra_bytes}

    def digest_parameters(self) -> dict[str, list[Any]]:
        """Shape, dtype and a digest of the bytes of every parameter and persistent buffer."""
        import hashlib

        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        found = {}
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.state_dict().items()]:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = [list(tensor.shape), str(tensor.dtype), hashlib.sha256(raw).hexdigest()]
        return found

    def addresses(self) -> dict[str, list[int]]:
        """Identity and address of every parameter."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {n: [id(p), p.data_ptr()] for n, p in model.named_parameters(remove_duplicate=False)}


def _halves(region: Region) -> tuple[Region, ...]:
    """The region in two parts along its last dim longer than one."""
    for dim in reversed(range(len(region.extent))):
        if region.extent[dim] > 1:
            return region.split(dim, 2)
    return (region,)


def _forget_parallel_state() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
