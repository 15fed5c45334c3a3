"""What runs inside NeMo RL's stock trainer actors: one rank of a refit, performed on the policy worker itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_rl_reshard.orchestration.rank_operations import perform
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.endpoint import Source


def perform_on_policy(worker: Any, operation: str, arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Perform one operation of the controller on a trainer actor's own instance; one plain outcome in a list.

    The session stays on `worker`, so it lives and dies with the actor. Raises nothing; see `perform`.
    """
    (argument,) = arguments
    return [perform(worker, Side.TRAINER, lambda rank: _source(worker, rank), operation, argument)]


def _source(worker: Any, rank: int) -> Source:
    from nemo_rl_reshard.sources.dtensor import DTensorSource

    return DTensorSource.from_model(worker.model, rank)
