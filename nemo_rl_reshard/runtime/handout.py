"""Handout: what the driver gives the ranks so that each can lower its own program; nearly all of it is one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.codec import plan_to_text
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.rounds import RoundLimits, round_starts
from nemo_rl_reshard.runtime.leftover_plan import Gather, Share, plan_leftovers

DEFAULT_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True)
class Handout:
    """`shared` is the same for every rank of the world, so that it is made and sent once. JSON types only.

    `shares` has the pieces that a trainer contributes to leftovers that are gathered and broadcast, by rank of the
    world; other ranks have none.
    """

    shared: Mapping[str, Any]
    shares: Mapping[int, Share]

    def own(self, rank: int) -> dict[str, Any]:
        """What only `rank` is told."""
        return {"rank": rank, "share": self.shares.get(rank)}

    def of_rank(self, rank: int) -> dict[str, Any]:
        """All that `rank` is told: what `Assignment.from_plain` reads."""
        return {**self.shared, **self.own(rank)}


def hand_out(
    plan: Plan,
    source: Catalog,
    *,
    in_flight: int = DEFAULT_IN_FLIGHT,
    gather: Gather = Gather.EVERYWHERE,
    in_rounds: bool = False,
    labels: Sequence[int] | None = None,
) -> Handout:
    """The handout of `plan`, which was made from `source`.

    Rounds are cut only if the world's transport goes `in_rounds`: they take seconds where a plan has millions of
    messages. Rank r of the world is rank `labels[r]` of the plan; by default both are numbered alike. Leftovers that
    the plan has not placed are gathered and broadcast; a plan of nothing else is the conventional refit.
    """
    bucket_bytes = plan.options.bucket_bytes
    leftovers = plan_leftovers(
        [plan.specs[leftover.tensor] for leftover in plan.broadcast],
        source.layouts,
        plan.sources,
        plan.targets,
        bucket_bytes=bucket_bytes,
        gather=gather,
    )
    if labels is not None:
        leftovers = leftovers.renumbered({label: rank for rank, label in enumerate(labels)})
    starts = None
    if in_rounds:
        limits = RoundLimits.of(
            in_flight=in_flight, bucket_bytes=bucket_bytes, message_bytes=plan.options.largest_message
        )
        starts = list(round_starts(plan, limits.messages))
    shared = {
        "digest": plan.digest,
        "plan": plan_to_text(plan),
        "labels": None if labels is None else list(labels),
        "in_flight": in_flight,
        "leftovers": leftovers.to_plain(),
        "round_starts": starts,
    }
    return Handout(shared, leftovers.shares())
