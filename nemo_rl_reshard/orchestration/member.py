"""Member: one actor of a refit, the ranks of the world it carries, and how it is asked to do something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle

from nemo_rl_reshard.orchestration.shared import Shared
from nemo_rl_reshard.params.manifest import Side


@dataclass(frozen=True)
class Member:
    """A trainer actor (one rank) or an inference actor (one rank per worker of its engine).

    The actor has a method `reshard(operation, arguments, shared)` that takes one plain argument per rank it carries and
    what all ranks are told alike, if anything is, and answers one plain `Outcome` per rank. Where actors are not ours,
    a subclass overrides `submit` alone.
    """

    name: str
    side: Side
    num_ranks: int
    handle: ActorHandle[Any]

    def submit(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Shared | None = None
    ) -> ObjectRef[Any]:
        """Start `operation`; the reference becomes a list of plain outcomes, one per rank, in rank order."""
        told = None if shared is None else shared.reference
        reference: ObjectRef[Any] = self.handle.reshard.remote(operation, list(arguments), told)
        return reference

    def rank_name(self, index: int) -> str:
        """What to call the `index`-th rank of this member in messages."""
        return f"{self.name} worker {index}" if self.num_ranks > 1 else self.name
