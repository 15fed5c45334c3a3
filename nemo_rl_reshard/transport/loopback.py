"""Loopback: N ranks in one process, one thread each, with the meaning of a real transport and none of its sockets.

A send completes only once its receiver has posted the buffer, as on NCCL: a program that needs a socket's slack to
finish hangs here first, and then fails by its deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_reshard.errors import RefitAbortedError, ReshardError, TransportError, TransportTimeoutError
from nemo_rl_reshard.transport.buffers import check_buffer, check_gather, check_members, check_peer
from nemo_rl_reshard.transport.deadline import Deadline


class LoopbackHub:
    """The wires between `size` ranks of one process. Every rank takes its end with `transport(rank)`."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a world needs at least one rank, not {size}")
        self.size = size
        self.changed = threading.Condition()
        self.abort_reason: str | None = None
        self.closed: set[int] = set()
        self.unmatched: dict[tuple[int, int], deque[_Operation]] = {}
        self.gathering: dict[tuple[tuple[int, ...], int], _Collective] = {}

    def transport(self, rank: int) -> LoopbackTransport:
        """The end that belongs to `rank`."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in a world of {self.size}")
        return LoopbackTransport(self, rank)


@dataclass(eq=False)
class _Operation:
    """One end of a message."""

    sends: bool
    buffer: Tensor
    done: bool = False
    fault: str | None = None


@dataclass(eq=False)
class _Collective:
    """One collective, from its first member's arrival to the copies that complete it."""

    kind: str
    nbytes: int
    buffers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    done: bool = False
    fault: str | None = None


class _LoopbackPending:
    """An operation or collective that its transport waits for."""

    def __init__(self, transport: LoopbackTransport, what: str, peers: tuple[int, ...], work: _Operation | _Collective):
        self._transport = transport
        self._what = what
        self._peers = peers
        self._work = work

    def wait(self, deadline: Deadline) -> None:
        """See `Pending.wait`."""
        self._transport.wait_for(self._work, self._what, self._peers, deadline)


class LoopbackTransport:
    """One rank's end of a LoopbackHub. Implements `Transport`."""

    in_rounds = False

    def __init__(self, hub: LoopbackHub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self.device = torch.device("cpu")
        self._hub = hub
        self._first_cause: ReshardError | None = None
        self._collectives: dict[tuple[int, ...], int] = {}

    def together(self) -> AbstractContextManager[None]:
        """See `Transport.together`; everything advances independently here."""
        return nullcontext()

    def send(self, buffer: Tensor, dst: int) -> _LoopbackPending:
        """See `Transport.send`."""
        check_buffer(buffer, f"send to rank {dst}")
        check_peer(dst, self.rank, self.size, "send")
        operation = _Operation(sends=True, buffer=buffer)
        self._match((self.rank, dst), operation)
        return _LoopbackPending(self, f"send to rank {dst}", (dst,), operation)

    def receive(self, buffer: Tensor, src: int) -> _LoopbackPending:
        """See `Transport.receive`."""
        check_buffer(buffer, f"receive from rank {src}")
        check_peer(src, self.rank, self.size, "receive")
        operation = _Operation(sends=False, buffer=buffer)
        self._match((src, self.rank), operation)
        return _LoopbackPending(self, f"receive from rank {src}", (src,), operation)

    def all_gather(self, output: Tensor, own: Tensor, ranks: tuple[int, ...]) -> _LoopbackPending:
        """See `Transport.all_gather`."""
        check_members(ranks, self.rank, self.size, "all_gather")
        check_gather(output, own, ranks)

        def copy(buffers: dict[int, tuple[Tensor, Tensor]]) -> None:
            for gathered, _ in buffers.values():
                for place, member in enumerate(ranks):
                    gathered[place * own.numel() : (place + 1) * own.numel()].copy_(buffers[member][1])

        return self._meet("all_gather", (output, own), ranks, own.numel(), copy)

    def broadcast(self, buffer: Tensor, root: int, ranks: tuple[int, ...]) -> _LoopbackPending:
        """See `Transport.broadcast`."""
        check_members(ranks, self.rank, self.size, "broadcast")
        check_buffer(buffer, "broadcast")
        if root not in ranks:
            raise TransportError(f"broadcast: root {root} is not among the members {ranks}")

        def copy(buffers: dict[int, tuple[Tensor, Tensor]]) -> None:
            for member in ranks:
                if member != root:
                    buffers[member][0].copy_(buffers[root][0])

        return self._meet(f"broadcast from rank {root}", (buffer, buffer), ranks, buffer.numel(), copy)

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        with self._hub.changed:
            if self._hub.abort_reason is None:
                self._hub.abort_reason = reason
            self._hub.changed.notify_all()

    def close(self) -> None:
        """See `Transport.close`."""
        with self._hub.changed:
            self._hub.closed.add(self.rank)
            self._hub.changed.notify_all()

    def wait_for(self, work: _Operation | _Collective, what: str, peers: tuple[int, ...], deadline: Deadline) -> None:
        """Block until `work` is done. Raises as `Pending.wait` does; any failure calls the refit off for all ranks."""
        hub = self._hub
        with hub.changed:
            while not work.done:
                self._raise_if_unusable()
                lost = [peer for peer in peers if peer in hub.closed]
                if work.fault is not None:
                    self._fail(TransportError(f"rank {self.rank}: {what}: {work.fault}"))
                if lost:
                    self._fail(TransportError(f"rank {self.rank}: {what}: rank {lost[0]} closed its transport"))
                if deadline.remaining_s() == 0:
                    message = f"rank {self.rank}: {what} passed its deadline of {deadline.budget_s:g} s"
                    self._fail(TransportTimeoutError(message))
                hub.changed.wait(deadline.remaining_s())

    def _match(self, pair: tuple[int, int], operation: _Operation) -> None:
        """Join `operation` with the oldest unmatched one of the other end, or queue it."""
        hub = self._hub
        with hub.changed:
            self._raise_if_unusable()
            queue = hub.unmatched.setdefault(pair, deque())
            if not queue or queue[0].sends == operation.sends:
                queue.append(operation)
                return
            other = queue.popleft()
        sender, receiver = (operation, other) if operation.sends else (other, operation)
        if sender.buffer.numel() == receiver.buffer.numel():
            receiver.buffer.copy_(sender.buffer)
        else:
            fault = f"the message has {sender.buffer.numel()} bytes, the buffer {receiver.buffer.numel()}"
            sender.fault = receiver.fault = fault
        with hub.changed:
            sender.done = receiver.done = sender.fault is None
            hub.changed.notify_all()

    def _meet(
        self,
        kind: str,
        buffers: tuple[Tensor, Tensor],
        ranks: tuple[int, ...],
        nbytes: int,
        copy: Callable[[dict[int, tuple[Tensor, Tensor]]], None],
    ) -> _LoopbackPending:
        """Arrive at the next collective of `ranks`; the last to arrive makes the copies."""
        hub = self._hub
        with hub.changed:
            self._raise_if_unusable()
            turn = self._collectives.get(ranks, 0)
            self._collectives[ranks] = turn + 1
            work = hub.gathering.setdefault((ranks, turn), _Collective(kind, nbytes))
            if (work.kind, work.nbytes) != (kind, nbytes):
                work.fault = (
                    f"rank {self.rank} came to {kind} of {nbytes} bytes, others to {work.kind} of {work.nbytes}"
                )
            work.buffers[self.rank] = buffers
            complete = len(work.buffers) == len(ranks)
            if complete:
                del hub.gathering[ranks, turn]
        if complete and work.fault is None:
            copy(work.buffers)
        with hub.changed:
            work.done = work.done or (complete and work.fault is None)
            hub.changed.notify_all()
        peers = tuple(member for member in ranks if member != self.rank)
        return _LoopbackPending(self, f"{kind} among ranks {ranks}", peers, work)

    def _raise_if_unusable(self) -> None:
        """Raise this rank's first cause, if it has one. Called with the hub's lock held."""
        if self._first_cause is None and self._hub.abort_reason is not None:
            self._first_cause = RefitAbortedError(self._hub.abort_reason)
        if self._first_cause is None and self.rank in self._hub.closed:
            self._first_cause = TransportError(f"rank {self.rank}: the transport is closed")
        if self._first_cause is not None:
            raise self._first_cause

    def _fail(self, cause: ReshardError) -> None:
        """Keep `cause`, call the refit off with it and raise it. Called with the hub's lock held."""
        self._first_cause = cause
        if self._hub.abort_reason is None:
            self._hub.abort_reason = str(cause)
        self._hub.changed.notify_all()
        raise cause
