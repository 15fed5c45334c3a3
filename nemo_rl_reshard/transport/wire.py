"""The rendezvous wire: authenticated connections that carry length-prefixed JSON, and nothing else.

Both ends prove that they know the refit's token by answering a fresh challenge (HMAC-SHA256), so the token itself never
travels and a recorded exchange is of no use. Values are bytes, base64 inside JSON: reading a frame can build strings,
numbers, lists and dicts, never objects or code. What follows the handshake is neither encrypted nor signed: the wire
keeps strangers out of a refit, it does not hide it from somebody who can rewrite packets.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
from hashlib import sha256
from typing import Any

from nemo_rl_reshard.errors import HandshakeError, TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline

MAX_FRAME_BYTES = 16 << 20
"""Longest frame. A group's addresses for 4,096 ranks fit many times over."""
MAX_GREETING_BYTES = 64
"""Longest frame that a peer may make us read before it has proven itself."""
MIN_TOKEN_BYTES = 16

_HEADER = struct.Struct("!I")
_MAGIC = b"refit/1:"
_CHALLENGE_BYTES = 32
_WELCOME = b"welcome"
_REFUSED = b"refused"


class Wire:
    """One connection. Not for use by two threads at once, except `close`, which wakes a blocked reader."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    @classmethod
    def connect(cls, address: tuple[str, int], token: bytes, deadline: Deadline) -> Wire:
        """Reach a server and prove the token to it, and it to us.

        Raises HandshakeError if the token is refused or the server does not know it, TransportError if nobody answers.
        """
        try:
            connection = socket.create_connection(address, timeout=max(0.001, deadline.remaining_s()))
        except OSError as fault:
            raise TransportError(f"no rendezvous at {address[0]}:{address[1]}: {fault}") from fault
        wire = cls(connection)
        try:
            wire._greet_server(token, deadline)
        except BaseException:
            wire.close()
            raise
        return wire

    def greet_client(self, token: bytes, deadline: Deadline) -> None:
        """The server's half of the handshake. Raises HandshakeError if the peer does not prove the token."""
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        self._write(_MAGIC + own, deadline)
        theirs = self._challenge(self._read(deadline, MAX_GREETING_BYTES))
        proof = self._read(deadline, MAX_GREETING_BYTES)
        if not hmac.compare_digest(proof, _prove(token, b"client", own, theirs)):
            self._write(_REFUSED, deadline)
            raise HandshakeError("a peer without the refit's token was refused")
        self._write(_WELCOME, deadline)
        self._write(_prove(token, b"server", own, theirs), deadline)

    def _greet_server(self, token: bytes, deadline: Deadline) -> None:
        theirs = self._challenge(self._read(deadline, MAX_GREETING_BYTES))
        own = secrets.token_bytes(_CHALLENGE_BYTES)
        self._write(_MAGIC + own, deadline)
        self._write(_prove(token, b"client", theirs, own), deadline)
        if self._read(deadline, MAX_GREETING_BYTES) != _WELCOME:
            raise HandshakeError("the rendezvous refused this rank: its token is not this refit's")
        proof = self._read(deadline, MAX_GREETING_BYTES)
        if not hmac.compare_digest(proof, _prove(token, b"server", theirs, own)):
            raise HandshakeError("the rendezvous does not know this refit's token: it is not the server of this refit")

    def send(self, message: Any, deadline: Deadline) -> None:
        """Write one message of JSON types."""
        self._write(json.dumps(message, separators=(",", ":")).encode(), deadline)

    def receive(self, deadline: Deadline | None) -> Any:
        """Read one message; without a deadline, wait until there is one or the connection ends.

        Raises TransportError when the connection ends or the frame is no JSON, TransportTimeoutError by the deadline.
        """
        frame = self._read(deadline, MAX_FRAME_BYTES)
        try:
            return json.loads(frame.decode())
        except (ValueError, RecursionError) as fault:
            raise TransportError(f"a frame of {len(frame)} bytes is not JSON: {fault}") from fault

    def close(self) -> None:
        """End the connection and wake whoever reads from it."""
        # Closing alone would leave a reader blocked on a descriptor number that the next socket may reuse.
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @staticmethod
    def _challenge(greeting: bytes) -> bytes:
        if len(greeting) != len(_MAGIC) + _CHALLENGE_BYTES or not greeting.startswith(_MAGIC):
            raise HandshakeError("the peer does not speak the rendezvous protocol")
        return greeting[len(_MAGIC) :]

    def _write(self, payload: bytes, deadline: Deadline) -> None:
        deadline.check("writing to the rendezvous")
        try:
            self._socket.settimeout(max(0.001, deadline.remaining_s()))
            self._socket.sendall(_HEADER.pack(len(payload)) + payload)
        except TimeoutError as fault:
            raise TransportTimeoutError(f"writing passed its deadline of {deadline.budget_s:g} s") from fault
        except OSError as fault:
            raise TransportError(f"the connection broke: {fault}") from fault

    def _read(self, deadline: Deadline | None, limit: int) -> bytes:
        (length,) = _HEADER.unpack(self._read_exactly(_HEADER.size, deadline))
        if length > limit:
            raise TransportError(f"the peer announced a frame of {length} bytes; at most {limit} are taken")
        return self._read_exactly(length, deadline)

    def _read_exactly(self, count: int, deadline: Deadline | None) -> bytes:
        taken = bytearray()
        while len(taken) < count:
            try:
                if deadline is not None:
                    deadline.check("reading")
                self._socket.settimeout(None if deadline is None else max(0.001, deadline.remaining_s()))
                piece = self._socket.recv(count - len(taken))
            except TimeoutError as fault:
                budget = 0 if deadline is None else deadline.budget_s
                raise TransportTimeoutError(f"reading passed its deadline of {budget:g} s") from fault
            except OSError as fault:
                raise TransportError(f"the connection broke: {fault}") from fault
            if not piece:
                raise TransportError("the peer closed the connection")
            taken += piece
        return bytes(taken)


def _prove(token: bytes, role: bytes, server_challenge: bytes, client_challenge: bytes) -> bytes:
    """What only a holder of `token` can say. The role keeps a proof from being sent back as the other end's."""
    return hmac.new(token, _MAGIC + role + server_challenge + client_challenge, sha256).digest()
