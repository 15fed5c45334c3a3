"""RendezvousConnection: a rank's end of one connection to the rendezvous of its refit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_rl_reshard.errors import TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.key_table import DONE, REFUSED, TIMED_OUT
from nemo_rl_reshard.transport.wire import Wire

_REPLY_S = 30.0
"""How long a server may take to answer, beyond any wait it was asked for."""


class RendezvousConnection:
    """One request at a time; `close` may come from another thread."""

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
