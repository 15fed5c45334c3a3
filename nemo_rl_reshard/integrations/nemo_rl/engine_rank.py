"""What runs inside the vLLM workers of NeMo RL's stock engines: one rank of a refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_rl_reshard.orchestration.worker_extension import perform_on_worker


def perform_on_engine(worker: Any, operation: str, arguments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Perform one operation of the controller; `arguments` has one entry per worker of this engine.

    `worker.rank` is the rank in the engine's own executor, from 0 in every engine. The rank in `torch.distributed`
    is another one when vLLM spreads experts over several engines (expert parallel larger than tensor parallel), and
    is not used. Raises nothing; the executor would lose the other workers' answers.
    """
    return perform_on_worker(worker, operation, arguments)
