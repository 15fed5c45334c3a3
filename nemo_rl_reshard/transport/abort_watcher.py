"""AbortWatcher: the thread that hears an abort while its rank is blocked in a wait and can hear nothing else."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable

from nemo_rl_reshard.errors import TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.rendezvous_connection import RendezvousConnection

_SLICE_S = 10.0
"""Longest single wait on the server. It answers as soon as the key is there, so this only bounds what a dead rank's
thread over there may cost."""


def abort_key(generation: int) -> str:
    """The key that holds the reason once a rank, or the driver, has called `generation` off."""
    return f"refit/{generation}/abort"


class AbortWatcher:
    """Waits for `key` on a connection of its own and calls back once, from its own thread."""

    def __init__(
        self,
        connection: RendezvousConnection,
        key: str,
        on_abort: Callable[[str], None],
        on_lost: Callable[[TransportError], None],
    ) -> None:
        """Start watching. `on_abort` gets the key's value; `on_lost` the error, if the rendezvous goes away."""
        self._connection = connection
        self._key = key
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="refit-abort-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and its connection. Safe to call twice; from a callback it only asks the thread to end."""
        self._stopping = True
        self._connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        try:
            self._wait_for_key()
            reason = base64.b64decode(self._connection.ask("get", self._key)).decode()
        except TransportError as fault:
            if not self._stopping:
                self._on_lost(fault)
            return
        if not self._stopping:
            self._on_abort(reason)

    def _wait_for_key(self) -> None:
        while not self._stopping:
            try:
                self._connection.wait([self._key], _SLICE_S)
            except TransportTimeoutError:
                continue
            return
        raise TransportError("the watcher was stopped")
