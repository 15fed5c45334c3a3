"""One process per rank on this machine, meeting over gloo on the loopback address, for `verify` and `bench`."""

from __future__ import annotations

import multiprocessing
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from nemo_rl_reshard.errors import RefitError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.rendezvous import RendezvousServer

HOST = "127.0.0.1"
_GRACE_S = 5.0
"""What other ranks get to report after the first failure, and to end after the last answer."""

Work = Callable[[Any, dict[str, Any]], Any]
"""A rank's work: its argument and its plain world in, a picklable result out. A module-level function."""


def run_ranks(
    work: Work, arguments: Sequence[Any], *, num_trainers: int, timeout_s: float, deadline_s: float | None = None
) -> list[Any]:
    """Run `work(arguments[rank], world)` in a process per rank; the results in rank order.

    `deadline_s` bounds what a rank waits for in transport, `timeout_s` the whole. Raises RefitError naming every rank
    that raised or died, TransportTimeoutError naming those that were not done. Leaves no process behind.
    """
    token = secrets.token_bytes(32)
    size = len(arguments)
    # Forked from a server that has torch imported and no thread yet: importing it once per rank takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with RendezvousServer(HOST, token) as server:
        processes: dict[int, BaseProcess] = {}
        pipes: dict[int, Connection] = {}
        try:
            for rank, argument in enumerate(arguments):
                world = {
                    "address": f"{server.address[0]}:{server.address[1]}",
                    "token_hex": token.hex(),
                    "rank": rank,
                    "size": size,
                    "host": HOST,
                    "generation": 1,
                    "deadline_s": deadline_s or timeout_s,
                    "num_trainers": num_trainers,
                }
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_serve, args=(work, argument, world, theirs), daemon=True)
                process.start()
                theirs.close()
                processes[rank], pipes[rank] = process, ours
            return _gather(processes, pipes, timeout_s)
        finally:
            for process in processes.values():
                process.join(_GRACE_S if process.is_alive() and process.exitcode is None else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes.values():
                pipe.close()


def _gather(processes: Mapping[int, BaseProcess], pipes: Mapping[int, Connection], timeout_s: float) -> list[Any]:
    """The answers of all ranks; a rank that ends without one died."""
    deadline = Deadline.after(timeout_s)
    results: dict[int, Any] = {}
    failures: dict[int, tuple[str, str]] = {}
    open_pipes = {pipe: rank for rank, pipe in pipes.items()}
    while open_pipes and deadline.remaining_s() > 0:
        for ready in wait(list(open_pipes), timeout=deadline.remaining_s()):
            assert isinstance(ready, Connection)
            rank = open_pipes.pop(ready)
            try:
                succeeded, answer = ready.recv()
            except EOFError:
                processes[rank].join(_GRACE_S)
                failures[rank] = ("died", f"the process ended with exit code {processes[rank].exitcode}")
            else:
                if succeeded:
                    results[rank] = answer
                else:
                    failures[rank] = answer
            if failures and deadline.remaining_s() > _GRACE_S:
                deadline = Deadline.after(_GRACE_S)
    if failures:
        raise _refit_error(failures)
    if open_pipes:
        raise TransportTimeoutError(f"ranks {sorted(open_pipes.values())} were not done after {timeout_s:g} s")
    return [results[rank] for rank in sorted(results)]


def _refit_error(failures: Mapping[int, tuple[str, str]]) -> RefitError:
    """First causes apart from ranks that timed out, were called off, or lost a peer."""
    waits = ("RefitAbortedError", "TransportTimeoutError", "TransportError")
    causes = {f"rank {rank}": text for rank, (kind, text) in sorted(failures.items()) if kind not in waits}
    waiting = {f"rank {rank}": text for rank, (kind, text) in sorted(failures.items()) if kind in waits}
    if not causes:
        causes, waiting = waiting, {}
    listed = "; ".join(f"{rank}: {text.strip().splitlines()[-1]}" for rank, text in causes.items())
    return RefitError(f"{len(causes)} of the ranks failed: {listed}", causes, waiting)


def _serve(work: Work, argument: Any, world: dict[str, Any], answers: Connection) -> None:
    """The life of one rank's process. One thread, as ranks share the machine's cores."""
    torch.set_num_threads(1)
    try:
        answer: tuple[bool, Any] = (True, work(argument, world))
    except BaseException as error:  # it is reported to the parent, whatever it is
        answer = (False, (type(error).__name__, traceback.format_exc()))
    answers.send(answer)
    answers.close()
