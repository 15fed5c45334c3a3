"""Assignment: everything one rank must know to run a plan, lowered by the rank itself from what all are handed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

import nemo_rl_reshard
from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.plan.codec import plan_from_text
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.rounds import RoundLimits
from nemo_rl_reshard.plan.transfer import RankProgram
from nemo_rl_reshard.runtime.leftover_plan import LeftoverProgram


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank's program and leftovers, and the sizes that every rank must share. The plan itself is not kept.

    `in_flight` bounds the messages under way, sends and receives apart; `bucket_bytes` the staging of each.
    `round_starts` are the orders at which all ranks begin a round; None where they were not asked for.
    """

    program: RankProgram
    leftovers: LeftoverProgram
    num_ranks: int
    in_flight: int
    bucket_bytes: int
    round_starts: tuple[int, ...] | None = None

    @property
    def round_limits(self) -> RoundLimits:
        """What bounds a round on every rank."""
        return RoundLimits.of(
            in_flight=self.in_flight, bucket_bytes=self.bucket_bytes, message_bytes=self.program.message_bytes
        )

    def fits(self, num_ranks: int, *, in_rounds: bool) -> bool:
        """Whether a world of `num_ranks` can run it whose transport goes `in_rounds` or not."""
        return self.num_ranks == num_ranks and (self.round_starts is not None or not in_rounds)

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

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], rank: int) -> Assignment:
        """Read `Handout.of_rank(rank)` and lower the rank's program; asks nobody, and every rank comes to what fits.

        Raises PlanError naming the rank if the plan is not the one that its digest seals, or knows no such rank, and
        if the handout is malformed or another rank's.
        """
        try:
            digest, text, labels = str(plain["digest"]), str(plain["plan"]), plain["labels"]
            leftovers, share, for_rank = plain["leftovers"], plain["share"], int(plain["rank"])
            in_flight, starts = int(plain["in_flight"]), plain["round_starts"]
            rounds = None if starts is None else tuple(int(order) for order in starts)
            index = None if labels is None else {int(label): place for place, label in enumerate(labels)}
        except (KeyError, TypeError, ValueError) as fault:
            raise PlanError(f"malformed handout: {fault!r}") from fault
        if for_rank != rank:
            raise PlanError(f"rank {rank} was given the handout of rank {for_rank}")
        if in_flight < 1:
            raise PlanError(f"in_flight {in_flight} must be positive")
        try:
            plan = plan_from_text(text, digest)
        except PlanError as fault:
            raise PlanError(
                f"rank {rank} refuses the plan that it was given: {fault}. The next refit hands it out anew; if that "
                "fails too, install the same nemo_rl_reshard for the driver and for every rank"
            ) from fault
        if index is None:
            program = lower(plan, rank)
        elif tuple(sorted(index)) != plan.ranks or rank not in index.values():
            raise PlanError(f"rank {rank} was told that the ranks of the plan are {labels}; they are {plan.ranks}")
        else:
            program = _renumbered(lower(plan, labels[rank]), index)
        mine = LeftoverProgram.from_plain(leftovers)
        if share is None and rank in mine.trainers:
            raise PlanError(f"malformed handout: rank {rank} is a trainer and was given no share of the leftovers")
        return cls(
            program=program,
            leftovers=mine if share is None else mine.with_share(share),
            num_ranks=len(plan.ranks),
            in_flight=in_flight,
            bucket_bytes=plan.options.bucket_bytes,
            round_starts=rounds,
        )


def _renumbered(program: RankProgram, index: Mapping[int, int]) -> RankProgram:
    """The same for a world in which rank r of the plan is rank `index[r]`. Orders and digest stay."""
    messages = tuple(replace(message, src=index[message.src], dst=index[message.dst]) for message in program.messages)
    return replace(program, rank=index[program.rank], messages=messages)
