"""RendezvousStore: the rendezvous as a torch store, so that process groups meet over authenticated connections.

torch's own TCPStore listens on every address and asks nobody for a token; a Python subclass of `Store` carries a gloo
group just as well, since a group only reads and writes a few small keys while it is built.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from nemo_rl_reshard.errors import RefitAbortedError, TransportError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.rendezvous import RendezvousConnection

Result = TypeVar("Result")


class RendezvousStore(Store):
    """One rank's access to the rendezvous. Safe from any number of threads: each request has a connection of its own.

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
