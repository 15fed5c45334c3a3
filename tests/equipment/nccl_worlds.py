"""Whole sessions of a planned refit over the simulation of NCCL, one thread per rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.distributed import HashStore

from equipment.nccl_semantics import NcclHub
from equipment.refit_worlds import assert_gather_then_slice
from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, raise_first
from nemo_rl_reshard.runtime.one_process import LoopbackMeeting, together
from nemo_rl_reshard.runtime.world import Seat


class NcclLikeWorld:
    """A world that stands; `refit` runs once on every rank and compares with gather-then-slice."""

    def __init__(self, ranks: Sequence[ExplicitRank], hub: NcclHub) -> None:
        self.hub = hub
        store = HashStore()
        self.live = {rank.rank: LiveRank(rank, lambda world: Seat(hub.transport(world.rank), store)) for rank in ranks}
        worlds = LoopbackMeeting().worlds(ranks[0].num_trainers, len(ranks))
        for rank, each in self.live.items():
            each.session.connect(worlds[rank])
            each.session.adopt(each.made_of.handout)

    def outcomes(self, version: int, verify: str = "full") -> dict[int, Any]:
        """One refit: each rank's report, or what it raised."""
        self.hub.rouse()
        order = {"version": version, "verify": verify, "deadline_s": 30.0, "seed": version}
        return together({rank: partial(self._run, each, order) for rank, each in self.live.items()}, 60.0)

    def refit(self, version: int, verify: str = "full") -> dict[int, Any]:
        for each in self.live.values():
            each.fill(version)
        reports = self.outcomes(version, verify)
        raise_first(reports)
        assert_gather_then_slice(self.live)
        return reports

    def _run(self, each: LiveRank, order: dict[str, Any]) -> dict[str, Any]:
        try:
            return each.session.refit(order)
        finally:
            self.hub.rest(each.made_of.rank)
