"""What every transport can do: move bytes between the ranks of one refit world. Knows no parameter names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from nemo_rl_reshard.transport.deadline import Deadline


class Pending(Protocol):
    """One started operation. Its buffer must not be read or written before `wait` returned."""

    def wait(self, deadline: Deadline) -> None:
        """Block until the operation is complete on this rank. A second call returns at once, or raises as the first.

        Raises TransportTimeoutError if `deadline` passes, RefitAbortedError if another rank called the refit off,
        TransportError for anything else (a peer died, a group broke). After any of them the transport is of no more
        use: every later call raises the first cause.
        """


class Transport(Protocol):
    """One rank's end of a refit world.

    Every buffer is a contiguous 1-D uint8 tensor on `device`. Starting an operation does not block, except that the
    first collective over a set of ranks meets the other members. One thread at a time may start operations; `abort`
    and `close` may come from any thread.

    Where `in_rounds` is true, as over NCCL, what a rank starts runs one after the other, and a message keeps all that
    comes after it waiting until its other end is started, too: both ranks must start it in the same turn, with
    `together`. Starting the first message of a pair may then block until its other end is started.
    """

    rank: int
    size: int
    device: torch.device
    in_rounds: bool

    def together(self) -> AbstractContextManager[None]:
        """The sends and receives that are started inside advance independently of each other, and end as one."""

    def send(self, buffer: Tensor, dst: int) -> Pending:
        """Send `buffer` to rank `dst`. Messages of one (source, receiver) pair arrive in the order they were sent."""

    def receive(self, buffer: Tensor, src: int) -> Pending:
        """Fill `buffer` with the next message from rank `src`, which must be exactly as long."""

    def all_gather(self, output: Tensor, own: Tensor, ranks: tuple[int, ...]) -> Pending:
        """Fill `output` with the `own` of every rank in `ranks`, in that order; all are equally long.

        Called by every rank in `ranks`; ranks that share several collectives must start them in the same order.
        """

    def broadcast(self, buffer: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        """Copy the `buffer` of rank `root`, one of `ranks`, into that of every other rank in `ranks`."""

    def abort(self, reason: str) -> None:
        """Call the refit off: every wait on every rank soon raises RefitAbortedError with `reason`. First one wins."""

    def close(self) -> None:
        """Give back sockets, threads and buffers. Safe to call twice, after a failure, and with dead peers."""
