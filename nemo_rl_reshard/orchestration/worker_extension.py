"""ReshardWorkerExtension: what every worker of a vLLM engine mixes in, given to the engine by dotted name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_reshard.orchestration.rank_operations import perform
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.targets.worker_extension import target_of_worker

WORKER_EXTENSION = f"{__name__}.ReshardWorkerExtension"


class ReshardWorkerExtension:
    """Methods called by name through the engine's `collective_rpc`: JSON types in and out, nothing pickled.

    Every call returns an outcome and raises nothing: an executor stops reading at the first worker that raised, and
    would take the other workers' late answers for those of its next call.
    """

    rank: int  # the worker's rank in its executor, set by vLLM

    def reshard_perform(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Perform one operation of the controller; `arguments` has one entry per worker of the engine.

        `shared` is part of each of them and the same in all.
        """
        return perform_on_worker(self, operation, arguments, shared)

    def reshard_process(self) -> dict[str, int]:
        """Which process this worker is, so that its death can be told from others'."""
        return {"rank": int(self.rank), "pid": os.getpid()}


def perform_on_worker(
    worker: Any, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`ReshardWorkerExtension.reshard_perform` as a function of the worker, for engines that take callables."""
    argument = {**(shared or {}), **arguments[int(worker.rank)]}
    return perform(worker, Side.INFERENCE, lambda _: target_of_worker(worker), operation, argument)
