"""Many refit worlds through the same spawned processes: one gloo transport per world size, a session per plan case."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from equipment.plan_case import PlanCase, planned
from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, explicit_ranks
from nemo_rl_reshard.cli.position_code import position_code
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.runtime.world import Seat, World, join_processes
from nemo_rl_reshard.transport.protocol import Transport

TURNS = (1, 2)
NOT_RUN = "not run: an earlier case of this world size broke its transport"
_REFIT_S = 60.0

Seats = dict[int, Seat]
Outcome = list[str]  # differences and failures of one rank in one case


class KeptTransport:
    """A transport that outlives the sessions that sit on it one after the other."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        """The next session goes on with it."""


@dataclass(frozen=True)
class CaseRank:
    """One rank of one case, as it travels to its process. `generation` is the case's own, above any world size."""

    case: str
    generation: int
    size: int
    rank: ExplicitRank


def run_cases(cases: Sequence[PlanCase], num_processes: int, timeout_s: float) -> dict[str, Outcome]:
    """Plan every case and run it twice on real processes. Case name -> differences and failures, empty if all is well.

    All cases share `num_processes` processes, of which a case uses as many as it has ranks. Trainers come first.
    """
    per_process: list[list[CaseRank]] = [[] for _ in range(num_processes)]
    for number, case in enumerate(cases):
        found = planned(case)
        ranks = explicit_ranks(found.source, found.target, found.plan)
        assert 2 <= len(ranks) <= num_processes, case.name
        for each in ranks:
            per_process[each.rank].append(CaseRank(case.name, num_processes + 1 + number, len(ranks), each))
    found_by_rank = run_ranks(_serve, per_process, num_trainers=1, timeout_s=timeout_s, deadline_s=_REFIT_S)
    outcomes: dict[str, Outcome] = {case.name: [] for case in cases}
    for found_here in found_by_rank:
        for name, outcome in found_here.items():
            outcomes[name] += outcome
    return outcomes


def _serve(work: Sequence[CaseRank], world: dict[str, Any]) -> dict[str, Outcome]:
    """One process: its rank of every case, in the order that all processes share."""
    seats: Seats = {}
    broken: set[int] = set()
    outcomes: dict[str, Outcome] = {}
    try:
        for each in work:
            if each.size in broken:
                outcomes[each.case] = [NOT_RUN]
                continue
            try:
                outcomes[each.case] = _run(each, world, seats)
            except Exception:
                broken.add(each.size)
                outcomes[each.case] = [f"rank {each.rank.label}: {traceback.format_exc()}"]
    finally:
        for seat in seats.values():
            seat.leave()
    return outcomes


def _run(each: CaseRank, world: Mapping[str, Any], seats: Seats) -> Outcome:
    """Two refits of one case on one rank."""

    def join(wanted: World) -> Seat:
        if wanted.size not in seats:
            seats[wanted.size] = join_processes(World.from_plain({**world, "size": each.size, "generation": each.size}))
        kept = seats[wanted.size]
        return Seat(KeptTransport(kept.transport), kept.store)  # type: ignore[arg-type]

    live = LiveRank(each.rank, join)
    live.session.connect(
        {**world, "size": each.size, "generation": each.generation, "num_trainers": each.rank.num_trainers}
    )
    live.session.adopt(each.rank.handout)
    found: Outcome = []
    for turn in TURNS:
        live.fill(turn)
        if live.target is not None and live.target.shards and not _differences(live, turn):
            found.append(f"rank {live.made_of.label}: has refit {turn} before it began, so comparing shows nothing")
        live.session.refit({"version": turn, "verify": "off", "deadline_s": _REFIT_S, "seed": turn})
        found += _differences(live, turn)
    return found


def _differences(live: LiveRank, turn: int) -> Outcome:
    """Gather-then-slice: every shard of the target against its slice of the whole that the trainers hold."""
    found: Outcome = []
    if live.target is None:
        return found
    wanted_dtypes = {spec.name: getattr(torch, spec.dtype) for spec in live.made_of.target_specs}
    for number, spec in enumerate(live.made_of.source_specs):
        whole = position_code(number, spec.shape, Region.whole(spec.shape), spec.dtype, turn)
        for region, values in live.target.shards.get(spec.name, ()):
            if not torch.equal(values, whole.to(wanted_dtypes[spec.name])[region.slices]):
                found.append(f"{spec.name}: rank {live.made_of.label} differs in {region} after refit {turn}")
    return found
