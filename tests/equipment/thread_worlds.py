"""Refit worlds whose ranks are threads of this process: over loopback, or over real gloo and a real rendezvous."""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nemo_rl_reshard.transport.loopback import LoopbackHub
from nemo_rl_reshard.transport.process_group import ProcessGroupTransport
from nemo_rl_reshard.transport.protocol import Transport
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore

HOST = "127.0.0.1"


def run_ranks(bodies: list[Callable[[], Any]], timeout_s: float = 30.0) -> list[Any]:
    """Run one body per rank, each in a thread; returns what each returned or the exception it raised."""
    outcomes: list[Any] = [None] * len(bodies)

    def run(rank: int) -> None:
        try:
            outcomes[rank] = bodies[rank]()
        except BaseException as fault:
            outcomes[rank] = fault

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(timeout_s)
        assert not thread.is_alive(), f"rank {rank} hangs"
    return outcomes


@contextmanager
def loopback_world(size: int) -> Iterator[list[Transport]]:
    hub = LoopbackHub(size)
    transports: list[Transport] = [hub.transport(rank) for rank in range(size)]
    yield transports
    for transport in transports:
        transport.close()


@contextmanager
def gloo_world(size: int, timeout_s: float = 20.0) -> Iterator[list[Transport]]:
    """Every rank has its own store and its own groups, as in a process of its own."""
    token = secrets.token_bytes(32)
    with RendezvousServer(HOST, token) as server:
        stores = [RendezvousStore(server.address, token, timeout_s) for _ in range(size)]
        transports = run_ranks(
            [
                lambda rank=rank: ProcessGroupTransport(stores[rank], rank, size, host=HOST, timeout_s=timeout_s)
                for rank in range(size)
            ]
        )
        assert all(isinstance(transport, ProcessGroupTransport) for transport in transports), transports
        yield transports
        for transport, store in zip(transports, stores, strict=True):
            transport.close()
            store.close()


def in_world(transports: list[Transport], body: Callable[[Transport], Any]) -> list[Any]:
    """Run `body` on every rank of a world."""
    return run_ranks([lambda transport=transport: body(transport) for transport in transports])
