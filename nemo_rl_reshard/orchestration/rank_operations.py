"""What one rank does when the controller asks: plain values in, a plain outcome out, the session kept on its holder.

The holder is whatever object lives as long as the rank: a trainer actor, or a worker of an engine. Every argument
carries `rank`, and `epoch`: see `EpochFence`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from nemo_rl_reshard.errors import StateError
from nemo_rl_reshard.orchestration.epoch import EpochFence
from nemo_rl_reshard.orchestration.outcome import Fault, Outcome
from nemo_rl_reshard.orchestration.rank_environment import rank_environment
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.endpoint import Source, Target
from nemo_rl_reshard.runtime.session import RankSession

HELD_ATTRIBUTE = "_reshard_rank"
OPERATIONS = ("declare", "connect", "adopt", "refit", "close")

MakeEnd = Callable[[int], Source | Target]


@dataclass
class HeldRank:
    """What a holder keeps of its rank from call to call.

    `may_be_mixed` outlives the session in which a refit began to write and did not finish.
    """

    fence: EpochFence = field(default_factory=EpochFence)
    session: RankSession | None = None
    may_be_mixed: bool = False

    @classmethod
    def of(cls, holder: object) -> HeldRank:
        """The one that `holder` keeps; a new one at first."""
        held: HeldRank | None = getattr(holder, HELD_ATTRIBUTE, None)
        if held is None:
            held = cls()
            setattr(holder, HELD_ATTRIBUTE, held)
        return held

    def close(self) -> None:
        """Close the session, if there is one."""
        if self.session is not None:
            session, self.session = self.session, None
            session.close()


@runtime_checkable
class _Replicated(Protocol):
    """A source that can show what it holds as a plain tensor, for comparison across ranks."""

    def replica_digests(self, *, num_trainers: int | None = None) -> tuple[Any, ...]:
        """Values with `to_plain`."""


def perform(
    holder: object, side: Side, make_end: MakeEnd, operation: str, argument: Mapping[str, Any]
) -> dict[str, Any]:
    """Do one of OPERATIONS for rank `argument["rank"]` and answer a plain `Outcome`; an error becomes its fault.

    `make_end(rank)` gives the rank's live weights as its `side` sees them; "declare" starts a fresh session round
    them, so that a rank whose last refit failed joins the next generation without a trace of it.
    """
    rank = int(argument["rank"])
    start_s = time.monotonic()
    value, fault = None, None
    held = HeldRank.of(holder)
    try:
        value = _dispatch(held, side, make_end, rank, operation, argument)
    except Exception as error:
        # Whatever it is: an engine would lose the other workers' answers if it escaped.
        fault = Fault.of(error)
    has_finished = operation == "refit" and fault is None and side is Side.INFERENCE
    written = held.may_be_mixed or has_finished
    return Outcome(rank, value, fault, time.monotonic() - start_s, written).to_plain()


def _dispatch(
    held: HeldRank, side: Side, make_end: MakeEnd, rank: int, operation: str, argument: Mapping[str, Any]
) -> Any:
    epoch = int(argument["epoch"])
    if operation == "declare":
        held.fence.declare(f"rank {rank}", epoch)
        return _declare(held, side, make_end, rank, argument)
    if operation == "close":
        if held.fence.leave(epoch):
            held.close()
        return None
    held.fence.check(f"rank {rank}", operation, epoch)
    session = held.session
    if session is None:
        raise StateError(f"{operation}: rank {rank} could not declare what it holds")
    if operation == "connect":
        world = dict(argument["world"])
        return session.connect({**world, "rank": rank, "host": address_towards(world["address"])})
    if operation == "adopt":
        return session.adopt(argument)
    if operation == "refit":
        return _refit(held, session, argument["order"])
    raise StateError(f"unknown operation {operation!r}; known are {', '.join(OPERATIONS)}")


def _refit(held: HeldRank, session: RankSession, order: Mapping[str, Any]) -> dict[str, Any]:
    try:
        report = session.refit(order)
    except BaseException:
        held.may_be_mixed |= session.may_be_mixed
        raise
    held.may_be_mixed = False
    return report


def _declare(held: HeldRank, side: Side, make_end: MakeEnd, rank: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """The rank's manifest, where it runs, and digests of what it holds without a DTensor that proves it a replica."""
    held.close()
    end = make_end(rank)
    ends: dict[str, Any] = {"source" if side is Side.TRAINER else "target": end}
    held.session = session = RankSession(rank, **ends)
    manifest = session.declare(argument["specs"])
    digests = end.replica_digests(num_trainers=argument["num_trainers"]) if isinstance(end, _Replicated) else ()
    return {
        "manifest": manifest,
        "replicas": [digest.to_plain() for digest in digests],
        "devices": session.devices.to_plain(),
        "environment": rank_environment(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }


def address_towards(address: str) -> str:
    """This process's own address as seen from `address` (`host:port`): where its peers can reach it. Sends nothing."""
    host, _, port = address.rpartition(":")
    family, kind, protocol, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
