"""ReshardTrainer: what a Ray trainer actor mixes in to be a rank of refits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_reshard.orchestration.rank_operations import perform
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.endpoint import Source


class ReshardTrainer(ABC):
    """Mix in and say in `reshard_source` what the actor trains. Carries one rank.

    A refit blocks the actor; calling it off does not need the actor, since that travels through the refit's store.
    """

    @abstractmethod
    def reshard_source(self, rank: int) -> Source:
        """The live weights as refit rank `rank` holds them; asked for whenever a refit world is built."""

    def reshard(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Perform one operation of the controller; plain argument in, plain outcome out."""
        (argument,) = arguments
        return [perform(self, Side.TRAINER, self.reshard_source, operation, {**(shared or {}), **argument})]
