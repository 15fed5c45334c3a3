"""A refit world in one process: a thread per rank over the loopback transport, for `verify` and for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch.distributed import HashStore  # type: ignore[attr-defined]

from nemo_rl_reshard.errors import TransportTimeoutError
from nemo_rl_reshard.runtime.world import Seat, World
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.loopback import LoopbackHub

Result = TypeVar("Result")


class LoopbackMeeting:
    """Where the ranks of one process meet; its `join` is a session's. Each generation has wires of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wires: dict[int, tuple[LoopbackHub, HashStore]] = {}

    def join(self, world: World) -> Seat:
        """Join `world`; does not wait for the others. `address`, `token_hex` and `host` are not looked at."""
        with self._lock:
            hub, store = self._wires.setdefault(world.generation, (LoopbackHub(world.size), HashStore()))
        return Seat(hub.transport(world.rank), store)

    def worlds(self, num_trainers: int, size: int, generation: int = 1) -> dict[int, dict[str, Any]]:
        """The plain world of every rank."""
        return {
            rank: {
                "address": "loopback:0",
                "token_hex": "",
                "rank": rank,
                "size": size,
                "host": "loopback",
                "generation": generation,
                "deadline_s": 60.0,
                "num_trainers": num_trainers,
            }
            for rank in range(size)
        }


def together(calls: Mapping[int, Callable[[], Result]], timeout_s: float) -> dict[int, Result | BaseException]:
    """Make every rank's call in a thread of its own; a call's exception is its result.

    Raises TransportTimeoutError naming the ranks that did not return in `timeout_s`.
    """
    results: dict[int, Result | BaseException] = {}

    def run(rank: int, call: Callable[[], Result]) -> None:
        try:
            results[rank] = call()
        except BaseException as error:
            results[rank] = error

    threads = {
        rank: threading.Thread(target=run, args=(rank, call), name=f"rank {rank}", daemon=True)
        for rank, call in calls.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = Deadline.after(timeout_s)
    for thread in threads.values():
        thread.join(deadline.remaining_s())
    hanging = [rank for rank, thread in threads.items() if thread.is_alive()]
    if hanging:
        raise TransportTimeoutError(f"ranks {hanging} did not return within {timeout_s:g} s")
    return dict(sorted(results.items()))
