"""From two lists of actors to one refit world: who has which rank, and the rendezvous where they meet."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from nemo_rl_reshard.errors import ConfigError, DeclarationError, FaultList, ReshardError
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.transport.abort_watcher import abort_key
from nemo_rl_reshard.transport.backends import goes_in_rounds
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore

_TOKEN_BYTES = 32
_CALL_OFF_S = 5.0


@dataclass(frozen=True)
class Seating:
    """Ranks of a world: trainers first, then the engines in order, each engine's workers by executor rank.

    `members` maps the first rank of every member to it.
    """

    members: dict[int, Member]
    num_trainers: int
    size: int

    @classmethod
    def of(cls, trainers: Sequence[Member], engines: Sequence[Member]) -> Seating:
        """Seat both sides. Raises DeclarationError listing every fault: an empty side, a name twice, a wrong side."""
        faults = FaultList("seating the members of a refit", DeclarationError)
        for side, members in ((Side.TRAINER, trainers), (Side.INFERENCE, engines)):
            if not members:
                faults.add(f"there is no {side} member")
            faults.extend(f"{member.name} is no {side} member" for member in members if member.side is not side)
        everyone = [*trainers, *engines]
        names = [member.name for member in everyone]
        faults.extend(f"two members are called {name}" for name in sorted({n for n in names if names.count(n) > 1}))
        faults.extend(f"{member.name} carries no rank" for member in everyone if member.num_ranks < 1)
        faults.raise_if_any()
        seats: dict[int, Member] = {}
        rank = 0
        for member in everyone:
            seats[rank] = member
            rank += member.num_ranks
        return cls(seats, sum(member.num_ranks for member in trainers), rank)

    def side(self, side: Side) -> dict[int, Member]:
        """The members of one side, by first rank."""
        return {first: member for first, member in self.members.items() if member.side is side}

    def rank_names(self) -> dict[int, str]:
        """What to call every rank in messages."""
        return {
            first + index: f"rank {first + index} ({member.rank_name(index)})"
            for first, member in self.members.items()
            for index in range(member.num_ranks)
        }


class WorldHost:
    """The driver's end of one generation of a refit world: owns its rendezvous and its secret, both used once."""

    def __init__(
        self, seating: Seating, host: str, generation: int, deadline_s: float, transport: str = "gloo"
    ) -> None:
        """Listen on `host`, an address of this machine, under a fresh random token; the system picks the port.

        `transport`, "gloo" or "nccl", is what the ranks will move bytes over. Raises ConfigError if `host` is no
        address of this machine.
        """
        self._seating = seating
        self._deadline_s = deadline_s
        self._transport = transport
        self.generation = generation
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            self._server = RendezvousServer(host, self._token)
        except OSError as fault:
            raise ConfigError(f"host: cannot listen on {host!r}: {fault}; give an address of this machine") from fault

    def to_plain(self) -> dict[str, Any]:
        """What every rank needs to join, except its own rank and address."""
        host, port = self._server.address
        return {
            "address": f"{host}:{port}",
            "token_hex": self._token.hex(),
            "size": self._seating.size,
            "generation": self.generation,
            "deadline_s": self._deadline_s,
            "num_trainers": self._seating.num_trainers,
            "transport": self._transport,
        }

    @property
    def in_rounds(self) -> bool:
        """Whether the ranks' transport goes in rounds, so that the driver has to cut them; see `Transport`."""
        return goes_in_rounds(self._transport)

    def call_off(self, reason: str) -> None:
        """Wake every rank of this generation that waits: it raises RefitAbortedError with `reason`. First one wins.

        Reaches ranks whose actor is blocked, since it travels through the store.
        """
        # If this fails the ranks still have their deadlines, and the caller has a failure to report already.
        with suppress(ReshardError), closing(self._connect()) as store:
            store.compare_set(abort_key(self.generation), "", reason)

    def close(self) -> None:
        """Stop listening; ranks that still wait there are woken with an error. Safe to call twice."""
        self._server.close()

    def _connect(self) -> RendezvousStore:
        return RendezvousStore(self._server.address, self._token, timeout_s=_CALL_OFF_S)


def check_reachable(host: str, hosts: Iterable[str]) -> None:
    """Raise ConfigError if ranks run on several `hosts` and the rendezvous would listen where only one reaches it."""
    several = sorted(set(hosts))
    if len(several) > 1 and _is_loopback(host):
        raise ConfigError(
            f"host: {host} is reached from one machine only, and the ranks run on {', '.join(several)}; give the "
            "driver's address on the network that joins them"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
