"""Assignment: everything one rank must know to run a plan, as the driver hands it out."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import nemo_rl_reshard
from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.codec import program_from_plain, program_to_plain
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.rounds import RoundLimits, round_starts
from nemo_rl_reshard.plan.transfer import RankProgram
from nemo_rl_reshard.runtime.leftover_plan import Gather, LeftoverProgram, plan_leftovers

DEFAULT_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank's program and leftovers, and the sizes that every rank must share.

    `in_flight` bounds the messages under way, sends and receives apart; `bucket_bytes` the staging of each.
    `round_starts` are the orders at which all ranks begin a round, for transports that need them.
    """

    program: RankProgram
    leftovers: LeftoverProgram
    num_ranks: int
    in_flight: int
    bucket_bytes: int
    round_starts: tuple[int, ...] = ()

    @property
    def round_limits(self) -> RoundLimits:
        """What bounds a round on every rank."""
        return RoundLimits.of(
            in_flight=self.in_flight, bucket_bytes=self.bucket_bytes, message_bytes=self.program.message_bytes
        )

    def statement(self) -> dict[str, Any]:
        """What must be equal on all ranks before the first byte moves."""
        return {
            "plan_digest": self.program.digest,
            "leftovers_digest": self.leftovers.digest,
            "num_ranks": self.num_ranks,
            "message_bytes": self.program.message_bytes,
            "bucket_bytes": self.bucket_bytes,
            "in_flight": self.in_flight,
            "rounds_digest": hashlib.blake2b(repr(self.round_starts).encode(), digest_size=8).hexdigest(),
            "package_version": nemo_rl_reshard.__version__,
            "torch_version": torch.__version__.split("+")[0],
            "byte_order": sys.byteorder,
        }

    def renumbered(self, index: Mapping[int, int]) -> Assignment:
        """The same for a world in which rank r of the plan is rank `index[r]`. Orders and digest stay."""
        messages = tuple(
            replace(message, src=index[message.src], dst=index[message.dst]) for message in self.program.messages
        )
        program = replace(self.program, rank=index[self.program.rank], messages=messages)
        return replace(self, program=program, leftovers=self.leftovers.renumbered(index))

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Inverse of `from_plain`."""
        return {
            "program": program_to_plain(self.program),
            "leftovers": self.leftovers.to_plain(),
            "num_ranks": self.num_ranks,
            "in_flight": self.in_flight,
            "bucket_bytes": self.bucket_bytes,
            "round_starts": list(self.round_starts),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], rank: int) -> Assignment:
        """Read what `to_plain` wrote for `rank`. Raises PlanError if malformed, or if it is another rank's."""
        try:
            program, leftovers = plain["program"], plain["leftovers"]
            num_ranks, in_flight = int(plain["num_ranks"]), int(plain["in_flight"])
            bucket_bytes = int(plain["bucket_bytes"])
            rounds = tuple(int(order) for order in plain["round_starts"])
        except (KeyError, TypeError, ValueError) as fault:
            raise PlanError(f"malformed assignment: {fault}") from fault
        found = program_from_plain(program)
        if found.rank != rank:
            raise PlanError(f"rank {rank} was given the program of rank {found.rank}")
        if in_flight < 1 or bucket_bytes < 1:
            raise PlanError(f"in_flight {in_flight} and bucket_bytes {bucket_bytes} must be positive")
        return cls(found, LeftoverProgram.from_plain(leftovers), num_ranks, in_flight, bucket_bytes, rounds)


def assign(
    plan: Plan,
    source: Catalog,
    *,
    in_flight: int = DEFAULT_IN_FLIGHT,
    gather: Gather = Gather.EVERYWHERE,
) -> dict[int, Assignment]:
    """The assignment of every rank of `plan`, which was made from `source`.

    Leftovers that the plan has not placed are gathered and broadcast; a plan of nothing else is the conventional refit.
    """
    ranks = sorted({*plan.sources, *plan.targets})
    leftovers = plan_leftovers(
        [plan.specs[leftover.tensor] for leftover in plan.broadcast],
        source.layouts,
        plan.sources,
        plan.targets,
        bucket_bytes=plan.options.bucket_bytes,
        gather=gather,
    )
    bucket_bytes = plan.options.bucket_bytes
    programs = {rank: lower(plan, rank) for rank in ranks}
    limits = RoundLimits.of(in_flight=in_flight, bucket_bytes=bucket_bytes, message_bytes=plan.options.largest_message)
    rounds = round_starts(programs.values(), limits.messages)
    return {
        rank: Assignment(program, leftovers.of_rank(rank), len(ranks), in_flight, bucket_bytes, rounds)
        for rank, program in programs.items()
    }
