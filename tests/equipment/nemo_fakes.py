"""NeMo RL as the plugin sees it: its actors and driver objects, small and real, without NeMo RL, vLLM or CUDA.

Trainer actors are asyncio actors with FSDP2 models; an engine's workers are threads of the actor that owns it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn

from equipment.ray_faults import Planned, with_fault
from nemo_rl_reshard.integrations.nemo_rl.description import describe
from nemo_rl_reshard.integrations.nemo_rl.worker_classes import ReshardPolicyMethods
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.orchestration.rank_operations import HeldRank, perform
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.runtime.endpoint import Target
from nemo_rl_reshard.runtime.explicit import ExplicitTarget

NUM_TRAINERS, NUM_ENGINES, TP = 2, 2, 2
GATE, DOWN, NORM, HEAD = (
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
SPECS = (
    TensorSpec(GATE, (8, 6), "float32"),
    TensorSpec(DOWN, (3, 8), "float32"),
    TensorSpec(NORM, (5,), "float32"),
    TensorSpec(HEAD, (5, 4), "float32"),
)


def whole(spec: TensorSpec, version: int) -> torch.Tensor:
    """Every element tells version, tensor and position; exact in float32."""
    start = version * 4096 + SPECS.index(spec) * 512
    return torch.arange(start, start + spec.numel, dtype=torch.float32).view(spec.shape)


def part_of(spec: TensorSpec, rank: int) -> Region:
    """What worker `rank` of an engine needs: half the columns of a feed-forward matrix, all of the rest."""
    if spec.name not in (GATE, DOWN):
        return Region.whole(spec.shape)
    width = spec.shape[1] // TP
    return Region((0, rank * width), (spec.shape[0], width))


class TinyModel(nn.Module):
    """The tensors of SPECS under their names, and a configuration as transformers has one."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(architectures=["TinyForCausalLM"], tie_word_embeddings=False)
        for spec in SPECS:
            owner: nn.Module = self
            *path, leaf = spec.name.split(".")
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.register_parameter(leaf, nn.Parameter(torch.zeros(spec.shape)))


class PolicyWorker:
    """A stock policy worker: any coroutine among its methods makes it an asyncio actor."""

    def __init__(self, rank: int, store: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(store, NUM_TRAINERS), rank=rank, world_size=NUM_TRAINERS)
        self.rank = rank
        self.dtype = torch.float32
        self.cpu_offload = False
        self.model = fully_shard(TinyModel(), mesh=init_device_mesh("cpu", (NUM_TRAINERS,)))

    async def checkpoint_engine_rpc(self, checkpoint_method: str, method_kwargs: dict[str, Any] | None = None) -> Any:
        """There only to be a coroutine, as in the stock worker."""
        raise NotImplementedError(checkpoint_method, method_kwargs)

    def fill(self, version: int) -> None:
        """Hold this rank's shards of `version`."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place

        for spec in SPECS:
            parameter = self.model.get_parameter(spec.name)
            shape, offset = place(parameter.shape, parameter.device_mesh, parameter.placements)
            box = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            parameter.to_local().detach().copy_(whole(spec, version)[box])

    def gathered(self) -> dict[str, torch.Tensor]:
        """NeMo RL's own refit begins so: every tensor whole, on every rank."""
        return {spec.name: self.model.get_parameter(spec.name).full_tensor().detach() for spec in SPECS}

    def lose_plan(self) -> None:
        """Lose the plan that this rank was given, so that it cannot start the next refit."""
        HeldRank.of(self).session.declare()

    def threads(self) -> list[str]:
        """Names of the refit's threads that live in this actor."""
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("refit-")]


class EngineWorker:
    """A worker inside an engine: numbered in its own executor, with an end of plain tensors."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.fault: Planned | None = None
        self.operation = ""
        self.shards = {
            spec.name: [(part_of(spec, rank), torch.full(part_of(spec, rank).extent, torch.nan))] for spec in SPECS
        }

    def reshard_perform(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        self.operation = operation
        return perform(self, Side.INFERENCE, self._end, operation, {**(shared or {}), **arguments[self.rank]})

    def reshard_describe(self) -> dict[str, Any]:
        return describe(self)

    def _end(self, rank: int) -> Target:
        fault, self.fault = self.fault, None
        return with_fault(ExplicitTarget(SPECS, self.shards), fault, lambda: self.operation == "refit")


class Engine:
    """What `llm` is to its owner: workers that run together, requests, and a prefix cache."""

    def __init__(self, num_workers: int) -> None:
        torch.set_num_threads(1)
        self.workers = [EngineWorker(rank) for rank in range(num_workers)]
        self.counts = [0]
        self.cache = ["filled by the first weights"]
        self.encoder_outputs = ["seen through the first weights"]
        self.num_calls = 0
        self.llm_engine = self.output_processor = self

    def get_num_unfinished_requests(self) -> int:
        return self.counts.pop(0) if len(self.counts) > 1 else self.counts[0]

    def reset_prefix_cache(self) -> bool:
        if self.counts[0]:
            return False
        self.cache.clear()
        return True

    def reset_encoder_cache(self) -> None:
        self.encoder_outputs.clear()

    def collective_rpc(self, method: str | Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
        """On every worker at once; arguments arrive as plain values or not at all."""
        self.num_calls += 1
        arguments = json.loads(json.dumps(args))

        def call(worker: EngineWorker) -> Any:
            return getattr(worker, method)(*arguments) if isinstance(method, str) else method(worker, *arguments)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(call, self.workers))


class AsyncEngine(Engine):
    """The same behind coroutines, whose results may have to be awaited once more."""

    async def collective_rpc(self, method: str | Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return asyncio.to_thread(super().collective_rpc, method, args)

    async def reset_prefix_cache(self) -> bool:
        return super().reset_prefix_cache()


class EngineOwner:
    """The actor of a synchronous engine; with `num_workers` None, one that only lends its GPU to another's."""

    engine_class = Engine

    def __init__(self, num_workers: int | None) -> None:
        self.llm: Any = None if num_workers is None else self.engine_class(num_workers)

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_args: tuple[Any, ...] = ()) -> Any:
        return self.llm.collective_rpc(checkpoint_method, args=method_args)

    def reset_prefix_cache(self) -> None:
        self.llm.llm_engine.reset_prefix_cache()

    def arm(self, worker: int, fault: Planned) -> None:
        """Strike `fault` in the next world."""
        self.llm.workers[worker].fault = fault

    def have_requests(self, *counts: int) -> None:
        """What the next idle checks find, one after the other; the last count stays."""
        self.llm.counts = list(counts)

    def state(self) -> dict[str, Any]:
        """What its workers hold, by rank, what its caches hold, and how often its workers were called."""
        held = [{name: shards[0][1].clone() for name, shards in worker.shards.items()} for worker in self.llm.workers]
        caches = {"cache": list(self.llm.cache), "encoder": list(self.llm.encoder_outputs)}
        return {"held": held, "calls": self.llm.num_calls, **caches}

    def warm_cache(self) -> None:
        """Serve a prompt with an image, as it were."""
        self.llm.cache.append("filled since")
        self.llm.encoder_outputs.append("seen since")

    def load(self, gathered: dict[str, torch.Tensor]) -> bool:
        """NeMo RL's own refit ends so: the engine's loader cuts whole tensors."""
        for worker in self.llm.workers:
            for name, ((region, tensor),) in worker.shards.items():
                tensor.copy_(gathered[name][region.slices])
        return True


class AsyncEngineOwner(EngineOwner):
    """The actor of an asynchronous engine."""

    engine_class = AsyncEngine

    async def checkpoint_engine_rpc_async(self, checkpoint_method: str, method_args: tuple[Any, ...] = ()) -> Any:
        result = await self.llm.collective_rpc(checkpoint_method, args=method_args)
        while inspect.isawaitable(result):
            result = await result
        return result

    async def reset_prefix_cache_async(self) -> None:
        await self.llm.reset_prefix_cache()

    async def _reset_encoder_cache_after_weight_update(self) -> None:
        self.llm.encoder_outputs.clear()


class NamedPolicyWorker(ReshardPolicyMethods, PolicyWorker):
    """A policy worker of one's own, for a release in whose actors no function can be run."""


class NamedEngineOwner(EngineOwner):
    """The actor of an engine whose workers are of one's own and are asked by name alone."""

    def checkpoint_engine_rpc(self, checkpoint_method: str, method_args: tuple[Any, ...] = ()) -> Any:
        if callable(checkpoint_method):
            raise TypeError("a method is named by a str here")
        return super().checkpoint_engine_rpc(checkpoint_method, method_args)


class FakeTimer:
    """NeMo RL's Timer where the plugin uses it; not safe for two users of one label at once, as the real one."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.recorded: dict[str, list[float]] = {}

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        if label in self.running:
            raise ValueError(f"Timer '{label}' is already running")
        self.running.add(label)
        try:
            yield
        finally:
            self.running.remove(label)
            self.record(label, 0.0)

    def record(self, label: str, elapsed: float) -> None:
        self.recorded.setdefault(label, []).append(elapsed)


class FakeCluster:
    """A virtual cluster of `size` GPUs."""

    def __init__(self, size: int) -> None:
        self._size = size

    def world_size(self) -> int:
        return self._size


class FakePolicy:
    """The driver's end of the trainers."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.worker_group = SimpleNamespace(workers=list(workers))


class FakeGeneration:
    """The driver's end of the engines: asks its synchronizer to shut down before its actors, also when collected."""

    def __init__(self, workers: Sequence[Any], leaders: Sequence[int], config: Any, tp: int = TP) -> None:
        self.worker_group = SimpleNamespace(workers=list(workers), dp_leader_worker_indices=list(leaders))
        self.cfg = config
        self.tp_size, self.pp_size, self.ep_size = tp, 1, tp
        self.dp_size = len(leaders)
        self.weight_synchronizer: Any = None

    @property
    def owners(self) -> list[Any]:
        return [self.worker_group.workers[index] for index in self.worker_group.dp_leader_worker_indices]

    def shutdown(self) -> bool:
        try:
            if self.weight_synchronizer is not None:
                self.weight_synchronizer.shutdown()
        except Exception as error:
            sys.stderr.write(f"Error during policy shutdown: {error}\n")
            return False
        return True

    def __del__(self) -> None:
        self.shutdown()


def refit_policy_generation(
    policy: FakePolicy,
    policy_generation: FakeGeneration,
    colocated_inference: bool,
    _refit_buffer_size_gb: float | None = None,
    timer: Any = None,
    kv_scales: dict[str, float] | None = None,
) -> dict[str, float]:
    """NeMo RL's function of this name: the synchronizer if there is one, else gather, broadcast and load."""
    synchronizer = policy_generation.weight_synchronizer
    if synchronizer is not None:
        return synchronizer.sync_weights(timer=timer, kv_scales=kv_scales) or {}
    assert not colocated_inference
    with timer.time("prepare_for_generation/transfer_and_update_weights"):
        gathered = ray.get([worker.gathered.remote() for worker in policy.worker_group.workers])[0]
        assert all(ray.get([owner.load.remote(gathered) for owner in policy_generation.owners]))
    return {}


class NemoWorld:
    """Two trainers and two engines of two workers each, as NeMo RL's `setup` would return them."""

    clusters = (FakeCluster(NUM_TRAINERS), FakeCluster(NUM_ENGINES * TP))

    def __init__(self, store: str, *, is_async: bool, by_name: bool = False) -> None:
        self.is_async = is_async
        trainer = ray.remote(num_cpus=0)(NamedPolicyWorker if by_name else PolicyWorker)
        self.policy = FakePolicy([trainer.remote(rank, store) for rank in range(NUM_TRAINERS)])
        stock = AsyncEngineOwner if is_async else EngineOwner
        owner = ray.remote(num_cpus=0)(NamedEngineOwner if by_name else stock)
        workers = [owner.remote(TP if index % TP == 0 else None) for index in range(NUM_ENGINES * TP)]
        leaders = range(0, NUM_ENGINES * TP, TP)
        self.generation = FakeGeneration(workers, leaders, self.config()["policy"]["generation"])

    def config(self, grpo: dict[str, Any] | None = None, **section: Any) -> dict[str, Any]:
        """What NeMo RL's YAML says, with a `refit:` section of short waits."""
        engines = {"async_engine": self.is_async, "tensor_parallel_size": TP, "pipeline_parallel_size": 1}
        generation = {"backend": "vllm", "colocated": {"enabled": False}, "vllm_cfg": engines}
        refit = {"route": "all", "deadline_s": 8, "grace_s": 5, "setup_s": 60, "host": "127.0.0.1", **section}
        return {"policy": {"generation": generation}, "grpo": grpo or {}, "refit": refit}

    def fill(self, version: int) -> None:
        ray.get([worker.fill.remote(version) for worker in self.policy.worker_group.workers], timeout=60)

    def states(self) -> list[dict[str, Any]]:
        return ray.get([owner.state.remote() for owner in self.generation.owners], timeout=60)

    def assert_holds(self, version: int) -> None:
        """Every worker of every engine holds exactly gather-then-slice of `version`."""
        for index, state in enumerate(self.states()):
            for rank, held in enumerate(state["held"]):
                for spec in SPECS:
                    expected = whole(spec, version)[part_of(spec, rank).slices]
                    assert torch.equal(held[spec.name], expected), (index, rank, spec.name)

    def stop(self) -> None:
        for actor in [*self.policy.worker_group.workers, *self.generation.worker_group.workers]:
            ray.kill(actor)
