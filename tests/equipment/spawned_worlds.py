"""Refit worlds whose ranks are spawned processes; the test process holds the rendezvous, as a driver does."""

import multiprocessing
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard.transport.process_group import ProcessGroupTransport
from nemo_rl_reshard.transport.rendezvous import RendezvousServer, RendezvousStore

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """What one spawned rank needs to join."""

    rank: int
    size: int
    address: tuple[str, int]
    token: bytes

    def store(self, timeout_s: float = 30.0) -> RendezvousStore:
        return RendezvousStore(self.address, self.token, timeout_s)

    def join(self, store: RendezvousStore, timeout_s: float = 30.0, generation: int = 0) -> ProcessGroupTransport:
        return ProcessGroupTransport(store, self.rank, self.size, host=HOST, timeout_s=timeout_s, generation=generation)


def _enter(body: Callable[..., Any], seat: Seat, arguments: tuple[Any, ...], results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        results.send(body(seat, *arguments))
    except Exception as fault:
        results.send(fault)


def run_spawned(
    body: Callable[..., Any],
    size: int,
    *arguments: Any,
    num_started: int | None = None,
    timeout_s: float = 90.0,
    meanwhile: Callable[[RendezvousStore], None] | None = None,
) -> list[Any]:
    """Run `body(seat, *arguments)` in `size` processes (or only the first `num_started` of them).

    Returns, by rank, what each returned, the exception it raised, or its exit code if it died without a word.
    `meanwhile` runs here with a store of the world while the ranks run.
    """
    spawn = multiprocessing.get_context("spawn")
    token = secrets.token_bytes(32)
    with RendezvousServer(HOST, token) as server:
        processes, ends = [], []
        for rank in range(size if num_started is None else num_started):
            end, theirs = spawn.Pipe(duplex=False)
            seat = Seat(rank, size, server.address, token)
            process = spawn.Process(target=_enter, args=(body, seat, arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            ends.append(end)
        if meanwhile is not None:
            store = RendezvousStore(server.address, token, timeout_s)
            meanwhile(store)
            store.close()
        outcomes = []
        for process, end in zip(processes, ends, strict=True):
            try:
                assert end.poll(timeout_s), f"{process.name} hangs"
                outcomes.append(end.recv())
            except EOFError:
                process.join(timeout_s)
                outcomes.append(process.exitcode)
        for process in processes:
            process.join(timeout_s)
            assert process.exitcode is not None, f"{process.name} does not end"
            process.close()
        return outcomes
