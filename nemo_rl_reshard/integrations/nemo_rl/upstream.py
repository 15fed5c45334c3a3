"""The symbols of NeMo RL that the plugin relies on: one table, to be held against any release."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Symbol:
    """`name` in `module`: `function`, `Class.method` or `Class.attribute`.

    `parameters` are the names by which a function is called here, None for what is only read. A class attribute may
    be one that a method sets on `self`.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None
    why: str


_LOOPS = "nemo_rl.algorithms.grpo"
_INTERFACE = "nemo_rl.weight_sync.interfaces"
_GENERATION = "nemo_rl.models.generation.vllm.vllm_generation"
_RPC = "nemo_rl.models.generation.vllm.checkpoint_engine"
_SYNC, _ASYNC = "nemo_rl.models.generation.vllm.vllm_worker", "nemo_rl.models.generation.vllm.vllm_worker_async"
_V1 = "nemo_rl.models.policy.workers.dtensor_policy_worker"
_V2 = "nemo_rl.models.policy.workers.dtensor_policy_worker_v2"
_GROUPS = "nemo_rl.distributed.worker_groups"
_SINGLE = "nemo_rl.algorithms.single_controller_utils.setup"

SYMBOLS = (
    Symbol(
        _LOOPS,
        "refit_policy_generation",
        ("policy", "policy_generation", "colocated_inference", "timer", "kv_scales"),
        "asks the generation's synchronizer first; without one it is the refit to fall back to",
    ),
    Symbol(_LOOPS, "AsyncGRPOConfig.enabled", None, "whether engines may be generating during a refit"),
    Symbol(_LOOPS, "AsyncGRPOConfig.in_flight_weight_updates", None, "whether the loop wants that"),
    Symbol("nemo_rl.algorithms.ppo", "AsyncPPOConfig.in_flight_weight_updates", None, "whether the loop wants that"),
    Symbol(_INTERFACE, "WeightSynchronizer.sync_weights", ("timer", "kv_scales"), "what the loops call"),
    Symbol(_INTERFACE, "WeightSynchronizer.is_stale", None, "what the loops read before the first refit"),
    Symbol(_INTERFACE, "WeightSynchronizer.init_communicator", (), "part of the interface"),
    Symbol(_INTERFACE, "WeightSynchronizer.shutdown", (), "what a generation calls when it shuts down"),
    Symbol(_GENERATION, "VllmGeneration.weight_synchronizer", None, "where the loops look for a synchronizer"),
    Symbol(_GENERATION, "VllmGeneration.worker_group", None, "the engines' actors"),
    Symbol(_GENERATION, "VllmGeneration.cfg", None, "which worker class the engines' actors are"),
    Symbol(_GENERATION, "VllmGeneration.tp_size", None, "workers of an engine"),
    Symbol(_GENERATION, "VllmGeneration.pp_size", None, "workers of an engine"),
    Symbol("nemo_rl.models.policy.lm_policy", "Policy.worker_group", None, "the trainer actors"),
    Symbol(
        "nemo_rl.models.policy.lm_policy",
        "Policy.__init__",
        ("worker_extension_cls_fqn",),
        "the way in for worker classes of one's own",
    ),
    Symbol(_GROUPS, "RayWorkerGroup.workers", None, "actors in rank order"),
    Symbol(_GROUPS, "RayWorkerGroup.dp_leader_worker_indices", None, "which actors own an engine"),
    Symbol("nemo_rl.distributed.virtual_cluster", "RayVirtualCluster.world_size", (), "how many ranks a side has"),
    Symbol(
        _RPC,
        "VllmCheckpointEngineRpcMixin.checkpoint_engine_rpc",
        ("checkpoint_method", "method_args"),
        "the way to the workers of a synchronous engine",
    ),
    Symbol(
        _RPC,
        "VllmAsyncCheckpointEngineRpcMixin.checkpoint_engine_rpc_async",
        ("checkpoint_method", "method_args"),
        "the way to the workers of an asynchronous engine",
    ),
    Symbol(_SYNC, "VllmGenerationWorkerImpl.reset_prefix_cache", (), "forgetting what old weights computed"),
    Symbol(_SYNC, "BaseVllmGenerationWorker.llm", None, "whether the engine has requests"),
    Symbol(
        _ASYNC, "VllmAsyncGenerationWorkerImpl.reset_prefix_cache_async", (), "forgetting what old weights computed"
    ),
    Symbol(_ASYNC, "VllmAsyncGenerationWorkerImpl.llm", None, "whether the engine has requests"),
    Symbol(
        _ASYNC,
        "VllmAsyncGenerationWorkerImpl._reset_encoder_cache_after_weight_update",
        (),
        "what NeMo RL's own refits do last",
    ),
    Symbol(_V1, "DTensorPolicyWorkerImpl.model", None, "the weights that are sent"),
    Symbol(_V1, "DTensorPolicyWorkerImpl.rank", None, "proof that actors are in rank order"),
    Symbol(_V2, "DTensorPolicyWorkerV2Impl.model", None, "the weights that are sent"),
    Symbol(_V2, "DTensorPolicyWorkerV2Impl.rank", None, "proof that actors are in rank order"),
    Symbol("nemo_rl.utils.timer", "Timer.time", ("label",), "the standard label"),
    Symbol("nemo_rl.utils.timer", "Timer.record", ("label", "elapsed"), "a sub-label for every phase"),
    Symbol("nemo_rl.utils.logger", "Logger.log_metrics", ("metrics", "step", "prefix"), "seconds of setting up"),
    *(
        Symbol(_SINGLE, f"SingleControllerActorArgs.{field}", None, "what the single controller is started with")
        for field in ("gen_handle", "trainer_handle", "train_cluster", "inference_cluster", "weight_synchronizer")
    ),
)


def unmet(symbols: Iterable[Symbol] = SYMBOLS) -> Iterator[str]:
    """A sentence for every symbol that the NeMo RL of this environment lacks, or whose parameters are others.

    Imports the modules they are in, engines' and trainers' included.
    """
    for symbol in symbols:
        place = f"{symbol.module}.{symbol.name}"
        try:
            found = _resolve(symbol)
        except (ImportError, AttributeError) as fault:
            yield f"{place} is not there ({symbol.why}): {fault}"
            continue
        if symbol.parameters is None:
            continue
        taken = inspect.signature(found).parameters
        missing = [name for name in symbol.parameters if name not in taken]
        if missing:
            yield f"{place} takes no {', '.join(missing)} ({symbol.why}); it takes {', '.join(taken)}"


def _resolve(symbol: Symbol) -> Any:
    """What the symbol stands for, None for what only instances have. Raises ImportError or AttributeError."""
    owner: Any = importlib.import_module(symbol.module)
    *path, name = symbol.name.split(".")
    for step in path:
        owner = getattr(owner, step)
    if symbol.parameters is None and inspect.isclass(owner) and _sets(owner, name):
        return None
    return getattr(owner, name)


def _sets(owner: type, name: str) -> bool:
    """Whether the class has a field of this name, or one of its methods sets it on `self`."""
    return any(
        name in getattr(kind, "__annotations__", {}) or f"self.{name}" in inspect.getsource(kind)
        for kind in owner.__mro__
        if kind.__module__.partition(".")[0] == owner.__module__.partition(".")[0]
    )
