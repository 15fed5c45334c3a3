"""The engine of `verify`: run a spec's plan for real and compare every target element with what the trainers hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, explicit_ranks, raise_first
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.cli.refit_spec import RefitSpec, require_room_for
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.one_process import LoopbackMeeting, together
from nemo_rl_reshard.runtime.order import VerifyMode
from nemo_rl_reshard.runtime.world import join_processes

TURNS = (1, 2)
"""Refits, each with values of its own: the second shows what the first left behind."""

_REFIT_S = 120.0


@dataclass(frozen=True)
class RankFound:
    """What one rank found after one refit."""

    differences: tuple[str, ...]
    num_differences: int
    num_digests: int


@dataclass(frozen=True)
class VerifyResult:
    """`differences` has a sentence for every target element that is not the trainers', of all refits.

    Of more than a thousand in one shard it names the first thousand and counts the rest.
    """

    digest: str
    num_ranks: int
    num_refits: int
    num_elements: int
    num_digests: int
    num_differences: int
    processes: bool
    differences: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every element of every refit was right."""
        return not self.num_differences

    def to_plain(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "passed": self.passed,
            "digest": self.digest,
            "ranks": self.num_ranks,
            "refits": self.num_refits,
            "elements_compared": self.num_elements,
            "digests_compared": self.num_digests,
            "elements_different": self.num_differences,
            "processes": self.processes,
            "differences": list(self.differences),
        }


def verify_spec(spec: RefitSpec, *, processes: bool = False, timeout_s: float = 600.0) -> VerifyResult:
    """Plan `spec` and run it twice, in threads of this process or in a process per rank over gloo.

    Raises EnvironmentLacksError if it does not fit into memory, PlanError where no plan exists, and what a rank raised
    if a refit failed as a whole.
    """
    require_room_for(spec)
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    ranks = explicit_ranks(spec.source, spec.target, plan)
    if processes:
        per_rank = run_ranks(verify_rank, ranks, num_trainers=len(spec.source.ranks), timeout_s=timeout_s)
        results = [found for refits in per_rank for found in refits]
    else:
        results = _in_one_process(ranks, timeout_s)
    elements = sum(region.numel for rank in ranks for held in (rank.needs or {}).values() for region in held)
    return VerifyResult(
        digest=plan.digest,
        num_ranks=len(ranks),
        num_refits=len(TURNS),
        num_elements=elements * len(TURNS),
        num_digests=sum(found.num_digests for found in results),
        num_differences=sum(found.num_differences for found in results),
        processes=processes,
        differences=tuple(difference for found in results for difference in found.differences),
    )


def verify_rank(rank: ExplicitRank, world: dict[str, Any]) -> list[RankFound]:
    """One rank's process: what it found after each refit."""
    live = LiveRank(rank, join_processes)
    live.session.connect(world)
    live.session.adopt(rank.handout)
    try:
        return [_refit(live, turn) for turn in TURNS]
    finally:
        live.session.close()


def _in_one_process(ranks: tuple[ExplicitRank, ...], timeout_s: float) -> list[RankFound]:
    meeting = LoopbackMeeting()
    live = {rank.rank: LiveRank(rank, meeting.join) for rank in ranks}
    worlds = meeting.worlds(ranks[0].num_trainers, len(ranks))
    for rank, each in live.items():
        each.session.connect(worlds[rank])
        each.session.adopt(each.made_of.handout)
    found: list[RankFound] = []
    for turn in TURNS:
        results = together({rank: partial(_refit, each, turn) for rank, each in live.items()}, timeout_s)
        raise_first(results)
        found += [result for result in results.values() if isinstance(result, RankFound)]
    for each in live.values():
        each.session.close()
    return found


def _refit(live: LiveRank, turn: int) -> RankFound:
    live.fill(turn)
    order = {"version": turn, "verify": str(VerifyMode.FULL), "deadline_s": _REFIT_S, "seed": turn}
    report = live.session.refit(order)
    differences, count = live.differences(turn)
    return RankFound(tuple(differences), count, int(report["num_verified"]))
