"""The rendezvous of one refit: a small key-value server for ranks that hold the refit's token, and its torch store.

The server binds to the one address it is given, on a port that the system picks and that stays bound: nobody can take
the port between choosing and using it. torch's own TCPStore listens on every address and asks nobody for a token; a
Python subclass of `Store` carries a process group just as well, since a group only reads and writes a few small keys
while it is built. `wire` says what travels.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from nemo_rl_reshard.errors import HandshakeError, RefitAbortedError, TransportError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.key_table import REFUSED, KeyTable
from nemo_rl_reshard.transport.lobby import Lobby
from nemo_rl_reshard.transport.rendezvous_connection import RendezvousConnection
from nemo_rl_reshard.transport.wire import MIN_TOKEN_BYTES, Wire

Result = TypeVar("Result")

_REPLY_S = 30.0
"""How long a rank may take to read a reply before its connection is given up."""

_RETRY_S = 0.02

_UNPROVEN = 512
"""Connections that may be open at once without having proven the token; each has a thread of its own."""

_PATIENCE_S = 2.0
"""How long one of them is left in peace while others wait for its place."""


class RendezvousServer:
    """Listens until `close`. `address` is what ranks connect to; `num_refused` counts peers that proved no token."""

    def __init__(self, host: str, token: bytes, handshake_s: float = 10.0, lobby: Lobby | None = None) -> None:
        """Bind to `host`, which must be one address of this machine: a wildcard raises ValueError, as a short token.

        A peer has `handshake_s` to prove the token, and less while `lobby` is full.
        """
        if len(token) < MIN_TOKEN_BYTES:
            raise ValueError(f"a refit's token needs at least {MIN_TOKEN_BYTES} random bytes, not {len(token)}")
        family, _, _, _, bind_to = socket.getaddrinfo(host or "::", 0, type=socket.SOCK_STREAM)[0]
        if ip_address(str(bind_to[0])).is_unspecified:
            raise ValueError(f"the rendezvous must listen on one address of this machine, not on every one ({host!r})")
        self._listener = socket.create_server((str(bind_to[0]), 0), family=family, backlog=1024)
        bound = self._listener.getsockname()
        self.address: tuple[str, int] = (str(bound[0]), int(bound[1]))
        self.num_refused = 0
        self._token = token
        self._handshake_s = handshake_s
        self._table = KeyTable()
        self._lobby = lobby or Lobby(_UNPROVEN, _PATIENCE_S)
        self._lock = threading.Lock()
        self._closed = False
        self._open: dict[Wire, threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept, name="refit-rendezvous", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening and end every connection; whoever waits gets TransportError. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            serving = dict(self._open)
        # Shutting a listening socket down is what wakes its accept.
        with contextlib.suppress(OSError):  # where that is not allowed, closing it does
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._lobby.close()
        self._table.close()
        for wire in serving:
            wire.close()
        self._accepting.join()
        for thread in serving.values():
            thread.join()

    def __enter__(self) -> RendezvousServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # A peer hung up before it was accepted; or no descriptor is free, and then trying at once would spin.
                time.sleep(_RETRY_S)
                continue
            wire = Wire(connection)
            if not self._lobby.enter(wire):
                wire.close()
                return
            # The handshake runs in the connection's own thread: a silent stranger delays nobody else.
            thread = threading.Thread(target=self._serve, args=(wire,), name="refit-rendezvous-peer", daemon=True)
            with self._lock:
                if self._closed:
                    wire.close()
                    return
                self._open[wire] = thread
                thread.start()

    def _serve(self, wire: Wire) -> None:
        try:
            try:
                wire.greet_client(self._token, Deadline.after(self._handshake_s))
            finally:
                still_here = self._lobby.leave(wire)
        except (HandshakeError, TransportError):
            with self._lock:
                self.num_refused += 1
        else:
            if still_here:
                self._answer(wire)
        finally:
            wire.close()
            with self._lock:
                self._open.pop(wire, None)

    def _answer(self, wire: Wire) -> None:
        """Serve requests one by one until the connection ends."""
        while True:
            try:
                request = wire.receive(None)
                try:
                    reply = self._table.apply(request)
                except (TypeError, ValueError, KeyError, IndexError, OverflowError) as fault:
                    reply = [REFUSED, f"malformed request: {fault}"]
                wire.send(reply, Deadline.after(_REPLY_S))
            except TransportError:
                return


class RendezvousStore(Store):
    """One rank's access to the rendezvous. Safe from any number of threads: each request has a connection of its own.

    Keep a reference while anything of torch is built on it: torch itself holds only the native half.

    `stop_key`, once set, ends every wait as soon as some rank writes that key: they raise RefitAbortedError with the
    key's value as the reason.
    """

    def __init__(self, address: tuple[str, int], token: bytes, timeout_s: float) -> None:
        """Connect at once, so that a wrong token or address shows here.

        Raises HandshakeError if the token is refused, TransportError if nobody answers within `timeout_s`. Waits that
        are given no time of their own take at most `timeout_s`.
        """
        super().__init__()
        self.timeout_s = timeout_s
        self.stop_key: str | None = None
        self._address = (address[0], address[1])
        self._token = token
        self._lock = threading.Lock()
        self._idle: list[RendezvousConnection] = [self.connect()]
        self._busy: set[RendezvousConnection] = set()
        self._closed = False

    def connect(self) -> RendezvousConnection:
        """A new connection that the caller owns, for one thread that waits and must be woken on its own."""
        return RendezvousConnection(self._address, self._token, Deadline.after(self.timeout_s))

    def set(self, key: str, value: str | bytes) -> None:
        """Write `value` under `key`."""
        self._use(lambda connection: connection.ask("set", key, _text(value)))

    def get(self, key: str) -> bytes:
        """The value of `key`, waiting for it up to `timeout_s`."""
        self.wait([key])
        text = self._use(lambda connection: connection.ask("get", key))
        if text is None:
            raise TransportError(f"key {key} was deleted while this rank read it")
        return base64.b64decode(text)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, waiting for each as `get` does. NCCL asks so in a large world."""
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are there. Raises TransportTimeoutError, or RefitAbortedError through `stop_key`."""
        seconds = self.timeout_s if timeout is None else max(0.001, timeout.total_seconds())
        stop_key = self.stop_key
        if not self._use(lambda connection: connection.wait(keys, seconds, stop_key)):
            assert stop_key is not None
            reason = self._use(lambda connection: connection.ask("get", stop_key))
            raise RefitAbortedError(base64.b64decode(reason).decode())

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number under `key` (0 if absent) and return the sum."""
        return int(self._use(lambda connection: connection.ask("add", key, amount)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value equals `expected` (an absent key equals ""); return what holds afterwards."""
        held = self._use(lambda connection: connection.ask("compare_set", key, _text(expected), _text(desired)))
        return base64.b64decode(held)

    def check(self, keys: Sequence[str]) -> bool:
        """True if every key is there now."""
        return bool(self._use(lambda connection: connection.ask("check", list(keys))))

    def delete_key(self, key: str) -> bool:
        """Remove `key`; True if it was there."""
        return bool(self._use(lambda connection: connection.ask("delete", key)))

    def num_keys(self) -> int:
        """Number of keys that all ranks have set together."""
        return int(self._use(lambda connection: connection.ask("num_keys")))

    def close(self) -> None:
        """End every connection; requests under way raise TransportError. Safe to call twice."""
        with self._lock:
            self._closed = True
            connections = [*self._idle, *self._busy]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _use(self, request: Callable[[RendezvousConnection], Result]) -> Result:
        """Run `request` on an idle connection, or on a new one when all are taken by threads that wait."""
        with self._lock:
            if self._closed:
                raise TransportError("the connection to the rendezvous is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self.connect()
        with self._lock:
            self._busy.add(connection)
        healthy = False
        try:
            result = request(connection)
            healthy = True
        finally:
            with self._lock:
                self._busy.discard(connection)
                keep = healthy and not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()
        return result


def _text(value: Any) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else bytes(value)).decode()
