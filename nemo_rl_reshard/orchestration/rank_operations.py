"""What one rank does when the controller asks: plain values in, a plain outcome out, the session kept on its holder.

The holder is whatever object lives as long as the rank: a trainer actor, or a worker of an engine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from nemo_rl_reshard.errors import StateError
from nemo_rl_reshard.orchestration.outcome import Fault, Outcome
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.endpoint import Source, Target
from nemo_rl_reshard.runtime.session import RankSession

SESSION_ATTRIBUTE = "_reshard_session"
OPERATIONS = ("declare", "connect", "adopt", "refit", "close")

MakeEnd = Callable[[int], Source | Target]


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
    try:
        value = _dispatch(holder, side, make_end, rank, operation, argument)
    except Exception as error:
        # Whatever it is: an engine would lose the other workers' answers if it escaped.
        fault = Fault.of(error)
    return Outcome(rank, value, fault, time.monotonic() - start_s).to_plain()


def _dispatch(
    holder: object, side: Side, make_end: MakeEnd, rank: int, operation: str, argument: Mapping[str, Any]
) -> Any:
    if operation == "declare":
        return _declare(holder, side, make_end, rank, argument)
    if operation == "close":
        _close(holder)
        return None
    session = getattr(holder, SESSION_ATTRIBUTE, None)
    if session is None:
        raise StateError(f"{operation}: rank {rank} has declared nothing yet")
    if operation == "connect":
        world = dict(argument["world"])
        return session.connect({**world, "rank": rank, "host": address_towards(world["address"])})
    if operation == "adopt":
        return session.adopt(argument["program"])
    if operation == "refit":
        return session.refit(argument["order"])
    raise StateError(f"unknown operation {operation!r}; known are {', '.join(OPERATIONS)}")


def _declare(holder: object, side: Side, make_end: MakeEnd, rank: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """The rank's manifest, where it runs, and digests of what it holds without a DTensor that proves it a replica."""
    _close(holder)
    end = make_end(rank)
    ends: dict[str, Any] = {"source" if side is Side.TRAINER else "target": end}
    session = RankSession(rank, **ends)
    setattr(holder, SESSION_ATTRIBUTE, session)
    manifest = session.declare(argument["specs"])
    digests = end.replica_digests(num_trainers=argument["num_trainers"]) if isinstance(end, _Replicated) else ()
    return {
        "manifest": manifest,
        "replicas": [digest.to_plain() for digest in digests],
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


def _close(holder: object) -> None:
    session = getattr(holder, SESSION_ATTRIBUTE, None)
    if session is not None:
        setattr(holder, SESSION_ATTRIBUTE, None)
        session.close()
