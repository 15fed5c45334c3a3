"""World: where one rank sits in a refit world, and how it joins one of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from nemo_rl_reshard.errors import HandshakeError
from nemo_rl_reshard.transport.process_group import ProcessGroupTransport
from nemo_rl_reshard.transport.protocol import Transport
from nemo_rl_reshard.transport.rendezvous import RendezvousStore


@dataclass(frozen=True, slots=True)
class World:
    """A refit world as one rank joins it.

    `address` is the rendezvous's `host:port`, `token_hex` its secret, `host` this rank's own address as its peers
    reach it. Each rebuilt world has a higher `generation`; nothing of an earlier one is ever used again.
    Ranks below `num_trainers` are trainers. `transport` is "gloo" or "nccl"; `device` is where this rank's bytes lie
    on the wire, which the rank itself knows.
    """

    address: str
    token_hex: str = field(repr=False)
    rank: int
    size: int
    host: str
    generation: int
    deadline_s: float
    num_trainers: int
    transport: str = "gloo"
    device: str = "cpu"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> World:
        """Read plain values. Raises HandshakeError if a field is missing, malformed or contradicts another."""
        try:
            world = cls(
                address=str(plain["address"]),
                token_hex=str(plain["token_hex"]),
                rank=int(plain["rank"]),
                size=int(plain["size"]),
                host=str(plain["host"]),
                generation=int(plain["generation"]),
                deadline_s=float(plain["deadline_s"]),
                num_trainers=int(plain["num_trainers"]),
                transport=str(plain.get("transport", "gloo")),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise HandshakeError(f"malformed world: {fault}") from fault
        if not 0 <= world.rank < world.size or not 0 <= world.num_trainers <= world.size:
            raise HandshakeError(f"rank {world.rank} and {world.num_trainers} trainers in a world of {world.size}")
        return world


@dataclass(frozen=True, slots=True)
class Seat:
    """What a rank has after joining: the transport, and the store in which ranks agree."""

    transport: Transport
    store: Store

    def leave(self) -> None:
        """Close both. Safe with dead peers."""
        self.transport.close()
        if isinstance(self.store, RendezvousStore):
            self.store.close()


Join = Callable[[World], Seat]
"""Joins a world; blocks until all its ranks have."""


def join_processes(world: World) -> Seat:
    """Join a world of processes. Raises what RendezvousStore and ProcessGroupTransport raise."""
    host, _, port = world.address.rpartition(":")
    store = RendezvousStore((host.strip("[]"), int(port)), bytes.fromhex(world.token_hex), world.deadline_s)
    try:
        transport = ProcessGroupTransport(
            store,
            world.rank,
            world.size,
            host=world.host,
            backend=world.transport,
            device=world.device,
            timeout_s=world.deadline_s,
            generation=world.generation,
        )
    except BaseException:
        store.close()
        raise
    return Seat(transport, store)
