"""The rendezvous when strangers open more connections than it wants to hold."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from nemo_rl_reshard.transport.lobby import Lobby
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore

TOKEN = bytes(range(32))
ROOM, PATIENCE_S = 4, 0.1


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    with RendezvousServer("127.0.0.1", TOKEN, handshake_s=60, lobby=Lobby(ROOM, PATIENCE_S)) as running:
        yield running


def peer_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "refit-rendezvous-peer"}


def num_peers_left(others: set[threading.Thread], wanted: int) -> int:
    """Peer threads beside `others`, once there are no more than `wanted`, or after 30 s."""
    end_s = time.monotonic() + 30
    while len(peer_threads() - others) > wanted and time.monotonic() < end_s:
        threading.Event().wait(PATIENCE_S)
    return len(peer_threads() - others)


def strangers(stack: ExitStack, server: RendezvousServer, count: int) -> list[socket.socket]:
    return [stack.enter_context(socket.create_connection(server.address, timeout=30)) for _ in range(count)]


def until_dropped(stranger: socket.socket) -> None:
    """Read what the server greets with, until it ends the connection."""
    while stranger.recv(4096):
        pass


def test_a_rank_gets_in_behind_a_flood_of_strangers_that_say_nothing(server: RendezvousServer) -> None:
    """They would have held their places for the whole handshake time, a minute here."""
    with ExitStack() as stack:
        member = RendezvousStore(server.address, TOKEN, timeout_s=30)
        stack.callback(member.close)
        silent = strangers(stack, server, 10 * ROOM)
        start_s = time.monotonic()
        late = RendezvousStore(server.address, TOKEN, timeout_s=30)
        stack.callback(late.close)
        assert time.monotonic() - start_s < 25, "a busy machine takes its time, and a stranger could hold on for 60 s"
        late.set("key", "value")
        assert member.get("key") == b"value", "who has proven the token is left in peace"
        for stranger in silent[: 9 * ROOM]:
            until_dropped(stranger)


def test_nobody_is_shown_out_while_there_is_room(server: RendezvousServer) -> None:
    with ExitStack() as stack:
        silent = strangers(stack, server, ROOM - 1)
        for _ in range(3):
            RendezvousStore(server.address, TOKEN, timeout_s=30).close()
            threading.Event().wait(PATIENCE_S)
        assert server.num_refused == 0
        for stranger in silent:
            stranger.settimeout(0.05)
            assert len(stranger.recv(44)) == 44
            with pytest.raises(TimeoutError):
                stranger.recv(1)


def test_many_ranks_at_once_all_get_in() -> None:
    """More than there is room for: they come in turn, and none loses its place to the next."""
    with (
        RendezvousServer("127.0.0.1", TOKEN, lobby=Lobby(ROOM, 30)) as server,
        ThreadPoolExecutor(8 * ROOM) as pool,
    ):
        start_s = time.monotonic()
        stores = list(pool.map(lambda _: RendezvousStore(server.address, TOKEN, timeout_s=30), range(8 * ROOM)))
        assert time.monotonic() - start_s < 20, "a rank that is in makes room at once"
        assert [store.add("counter", 1) for store in stores] == list(range(1, 8 * ROOM + 1))
        assert server.num_refused == 0
        for store in stores:
            store.close()


def test_closing_does_not_wait_for_a_full_lobby() -> None:
    others = peer_threads()
    server = RendezvousServer("127.0.0.1", TOKEN, handshake_s=60, lobby=Lobby(1, 60))
    with ExitStack() as stack:
        strangers(stack, server, 3)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(server.close).result(10)
    assert num_peers_left(others, 0) == 0


def test_a_lobby_without_room_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="not 0"):
        Lobby(0, 1.0)
