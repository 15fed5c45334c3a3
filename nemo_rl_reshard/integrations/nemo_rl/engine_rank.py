"""What runs inside NeMo RL's stock engines: in every vLLM worker, and in the actor that owns the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_reshard.orchestration.worker_extension import perform_on_worker
from nemo_rl_reshard.targets.vllm_front import reset_caches


def perform_on_engine(
    worker: Any, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Perform one operation of the controller in one vLLM worker; `arguments` has one entry per worker of its engine.

    `shared` is part of each of them and the same in all.

    A worker class that brings a `reshard_perform` of its own is asked for that. `worker.rank` is the rank in the
    engine's own executor, from 0 in every engine. The rank in `torch.distributed` is another one when vLLM spreads
    experts over several engines (expert parallel larger than tensor parallel), and is not used. Raises nothing: the
    executor would lose the other workers' answers.
    """
    own = getattr(worker, "reshard_perform", None)
    if own is not None:
        answered: dict[str, Any] = own(operation, arguments, shared)
        return answered
    return perform_on_worker(worker, operation, arguments, shared)


def num_unfinished(owner: Any) -> int:
    """Requests that the engine of the actor `owner` has accepted and not finished. Asks no worker."""
    front = getattr(owner.llm, "llm_engine", owner.llm)
    return int(front.output_processor.get_num_unfinished_requests())


def forget_old_weights(owner: Any) -> None:
    """Drop what the old weights computed, in the actor `owner` of a synchronous engine.

    Raises TargetError if the engine keeps its prefix cache because requests still use it.
    """
    reset_caches(owner.llm)
