"""The rendezvous of one refit: a small key-value server that only ranks holding the refit's token can use.

It binds to the one address it is given, on a port that the system picks and that stays bound: nobody can take the port
between choosing and using it. Values are bytes; see `wire` for what travels.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

from nemo_rl_reshard.errors import HandshakeError, TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.wire import MIN_TOKEN_BYTES, Wire

DONE, TIMED_OUT, STOPPED, REFUSED = "done", "timed out", "stopped", "refused"
"""How a request ended: the first element of every reply. The second is the result, or what went wrong."""

_REPLY_S = 30.0


class RendezvousServer:
    """Listens until `close`. `address` is what ranks connect to; `num_refused` counts peers that proved no token."""

    def __init__(self, host: str, token: bytes, handshake_s: float = 10.0) -> None:
        """Bind to `host`, which must be one address of this machine: a wildcard raises ValueError, as a short token."""
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
        self._table = _Table()
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
                continue  # one peer hung up before it was accepted
            wire = Wire(connection)
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
            wire.greet_client(self._token, Deadline.after(self._handshake_s))
        except (HandshakeError, TransportError):
            with self._lock:
                self.num_refused += 1
        else:
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
                except (TypeError, ValueError, KeyError, IndexError) as fault:
                    reply = [REFUSED, f"malformed request: {fault}"]
                wire.send(reply, Deadline.after(_REPLY_S))
            except TransportError:
                return


class _Table:
    """Keys, values and whoever waits for a key. Speaks base64 text outside, bytes inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, set[threading.Event]] = {}
        self._closed = False

    def apply(self, request: Any) -> list[Any]:
        """Run one request `[operation, ...]`. Raises ValueError, TypeError, KeyError or IndexError if malformed."""
        operation, *arguments = request
        if operation == "wait":
            keys, seconds, stop_key = arguments
            return self._wait([str(key) for key in keys], float(seconds), None if stop_key is None else str(stop_key))
        with self._lock:
            return [DONE, self._apply_at_once(str(operation), arguments)]

    def close(self) -> None:
        """Wake every wait."""
        with self._lock:
            self._closed = True
            for events in self._waiting.values():
                for event in events:
                    event.set()

    def _apply_at_once(self, operation: str, arguments: list[Any]) -> Any:
        """Everything but waiting. Called with the lock held."""
        values = self._values
        match operation:
            case "set":
                self._put(str(arguments[0]), base64.b64decode(arguments[1], validate=True))
                return None
            case "get":
                value = values.get(str(arguments[0]))
                return None if value is None else base64.b64encode(value).decode()
            case "add":
                total = int(values.get(str(arguments[0]), b"0")) + int(arguments[1])
                self._put(str(arguments[0]), str(total).encode())
                return total
            case "compare_set":
                key, expected, desired = (
                    str(arguments[0]),
                    *(base64.b64decode(text, validate=True) for text in arguments[1:]),
                )
                # As torch's stores do it: an absent key equals an empty expectation, and the answer is what holds now.
                if values.get(key, b"") == expected:
                    self._put(key, desired)
                return base64.b64encode(values.get(key, expected)).decode()
            case "check":
                return all(str(key) in values for key in arguments[0])
            case "delete":
                return values.pop(str(arguments[0]), None) is not None
            case "num_keys":
                return len(values)
        raise ValueError(f"unknown operation {operation!r}")

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for event in self._waiting.get(key, ()):
            event.set()

    def _wait(self, keys: Sequence[str], seconds: float, stop_key: str | None) -> list[Any]:
        """Block until every key is there, `stop_key` is there, or the time is over."""
        deadline = Deadline.after(seconds)
        changed = threading.Event()
        watched = {*keys, *([] if stop_key is None else [stop_key])}
        with self._lock:
            for key in watched:
                self._waiting.setdefault(key, set()).add(changed)
        try:
            while True:
                with self._lock:
                    changed.clear()
                    missing = [key for key in keys if key not in self._values]
                    stopped = stop_key is not None and stop_key in self._values
                    closed = self._closed
                if not missing:
                    return [DONE, None]
                if stopped:
                    return [STOPPED, stop_key]
                if closed:
                    raise TransportError("the rendezvous closed")
                if deadline.remaining_s() == 0:
                    return [TIMED_OUT, missing]
                changed.wait(deadline.remaining_s())
        finally:
            with self._lock:
                for key in watched:
                    events = self._waiting[key]
                    events.discard(changed)
                    if not events:
                        del self._waiting[key]


class RendezvousConnection:
    """A rank's end of one connection to the rendezvous: one request at a time."""

    def __init__(self, address: tuple[str, int], token: bytes, deadline: Deadline) -> None:
        """Connect and prove the token. Raises HandshakeError if refused, TransportError if nobody answers."""
        self._wire = Wire.connect(address, token, deadline)

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Run an operation that does not wait for other ranks, and return its result."""
        return self._exchange([operation, *arguments], Deadline.after(_REPLY_S))[1]

    def wait(self, keys: Sequence[str], seconds: float, stop_key: str | None = None) -> bool:
        """Block until every key is there: True; or until `stop_key` is there: False.

        Raises TransportTimeoutError naming the keys that are still missing after `seconds`.
        """
        # The server keeps the time; the slack only bounds the wait for a server that stopped answering.
        ending, result = self._exchange(["wait", list(keys), seconds, stop_key], Deadline.after(seconds + _REPLY_S))
        if ending == TIMED_OUT:
            raise TransportTimeoutError(f"no rank set {', '.join(result)} within {seconds:g} s")
        return bool(ending == DONE)

    def close(self) -> None:
        """End the connection; a request under way in another thread raises TransportError."""
        self._wire.close()

    def _exchange(self, request: list[Any], deadline: Deadline) -> list[Any]:
        try:
            self._wire.send(request, deadline)
            reply = self._wire.receive(deadline)
        except TransportTimeoutError as fault:
            raise TransportError(f"the rendezvous did not answer: {fault}") from fault
        if reply[0] == REFUSED:
            raise TransportError(f"the rendezvous refused {request[0]!r}: {reply[1]}")
        return list(reply)
