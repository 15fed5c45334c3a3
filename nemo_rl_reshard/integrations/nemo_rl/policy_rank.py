"""What runs inside NeMo RL's stock trainer actors: one rank of a refit, performed on the policy worker itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_reshard.integrations.nemo_rl.policy_source import source_of_policy
from nemo_rl_reshard.orchestration.rank_operations import perform
from nemo_rl_reshard.params.manifest import Side


def perform_on_policy(
    worker: Any, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Perform one operation of the controller on a trainer actor's own instance; one plain outcome in a list.

    What a rank keeps stays on `worker`, so it lives and dies with the actor. Raises nothing; see `perform`.
    """
    (argument,) = arguments
    argument = {**(shared or {}), **argument}
    return [perform(worker, Side.TRAINER, lambda rank: source_of_policy(worker, rank), operation, argument)]
