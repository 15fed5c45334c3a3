"""KeyTable: what a rendezvous remembers, and how the requests of many connections work on it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Sequence
from typing import Any

from nemo_rl_reshard.errors import TransportError
from nemo_rl_reshard.transport.deadline import Deadline

DONE, TIMED_OUT, STOPPED, REFUSED = "done", "timed out", "stopped", "refused"
"""How a request ended: the first element of every reply. The second is the result, or what went wrong."""


class KeyTable:
    """Keys, values and whoever waits for a key.

    Requests and replies are JSON types: values are base64 text outside, bytes inside.
    """

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
