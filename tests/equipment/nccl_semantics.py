"""A transport that blocks where NCCL blocks: streams of kernels that wait for their peers, and notice of a deadlock.

What NCCL's guide and torch's ProcessGroupNCCL say, made into a simulation in one process:

- Every communicator has one stream on each of its ranks. What is started goes to its end, and only what is at the head
  of a stream runs; the host does not wait for it.
- Operations started together are one kernel. Inside it they advance independently; it ends when all of them have.
- A send and the receive that it meets (the n-th of a pair meets the n-th) both take part only while the kernels that
  hold them run. A collective needs its kernel to run on every member.
- The first use of a communicator, and of a pair in a direction, connects: whoever starts it waits there, on the host,
  until the other end starts its part.

`one_stream` is the worst case, in which the streams of a device run one kernel at a time between them, as they do when
kernels do not fit beside each other. When every rank waits and nothing can ever move again, all raise DeadlockError.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_reshard.errors import RefitAbortedError, ReshardError, TransportTimeoutError
from nemo_rl_reshard.transport.buffers import check_buffer, check_gather, check_members, check_peer
from nemo_rl_reshard.transport.deadline import Deadline


class DeadlockError(AssertionError):
    """Every rank waits, and none can be woken by another."""


Buffers = tuple[Tensor, Tensor]
"""What a rank gives to an operation and what it takes from it; the same tensor twice for a message."""


@dataclass(eq=False)
class _Operation:
    """One rank's end of a message or of a collective; `meeting` is what it shares with the other ends."""

    buffers: Buffers
    meeting: _Meeting
    kernel: _Kernel | None = None
    done: bool = False


@dataclass(eq=False)
class _Meeting:
    """All ends of one message or collective, and the copies that are made once all of their kernels run."""

    name: str
    members: tuple[int, ...]
    copy: Callable[[dict[int, Buffers]], None]
    ends: dict[int, _Operation] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.ends) == len(self.members)


@dataclass(eq=False)
class _Kernel:
    """What one rank started together, on one stream."""

    rank: int
    communicator: tuple[int, ...]
    operations: list[_Operation]
    done: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.rank}: " + ", ".join(end.meeting.name for end in self.operations if not end.done)


class NcclHub:
    """The GPUs and wires of `size` ranks. `transport(rank)` is a rank's end; call `rest(rank)` when its thread ends."""

    def __init__(
        self,
        size: int,
        *,
        one_stream: bool = False,
        pairs_apart: bool = False,
        connected: bool = False,
        notices_deadlock: bool = True,
    ) -> None:
        """`pairs_apart` gives each pair of ranks a communicator of its own, as torch does for single sends.

        `connected` leaves out what happens at first use. A hub whose ranks also wait elsewhere `notices_deadlock` not.
        """
        self.size = size
        self.one_stream = one_stream
        self.pairs_apart = pairs_apart
        self.connected = connected
        self.notices_deadlock = notices_deadlock
        self.broken: set[int] = set()
        self.changed = threading.Condition()
        self.abort_reason: str | None = None
        self.deadlock: str | None = None
        self.most_operations = 0
        self._streams: dict[tuple[int, tuple[int, ...]], deque[_Kernel]] = {}
        self._messages: dict[tuple[int, int], deque[_Meeting]] = {}
        self._collectives: dict[tuple[tuple[int, ...], int], _Meeting] = {}
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._resting: set[int] = set()

    def transport(self, rank: int) -> NcclLikeTransport:
        return NcclLikeTransport(self, rank)

    def rest(self, rank: int) -> None:
        """The thread of `rank` starts nothing more for now."""
        with self.changed:
            self._resting.add(rank)
            self.notice_deadlock()

    def rouse(self) -> None:
        """All ranks run again."""
        with self.changed:
            self._resting.clear()

    def break_off(self, rank: int) -> None:
        """Abort on `rank` alone: what runs there ends without its bytes, and what the host waits for raises."""
        with self.changed:
            self.broken.add(rank)
            for (owner, _), stream in self._streams.items():
                if owner == rank:
                    for kernel in stream:
                        kernel.done = True
                    stream.clear()
            self.changed.notify_all()

    def message(self, src: int, dst: int, buffer: Tensor, *, sends: bool) -> _Operation:
        """One end of the next message of a pair."""
        rank = src if sends else dst
        queue = self._messages.setdefault((src, dst), deque())
        meeting = next((each for each in queue if rank not in each.ends), None)
        if meeting is None:
            meeting = _Meeting(f"message {src} -> {dst}", (src, dst), lambda ends: _deliver(ends[src], ends[dst]))
            queue.append(meeting)
        return self._join(meeting, rank, (buffer, buffer))

    def collective(
        self, name: str, ranks: tuple[int, ...], turn: int, rank: int, buffers: Buffers, copy: Callable[..., None]
    ) -> _Operation:
        """One member's part in the `turn`-th collective of `ranks`."""
        meeting = self._collectives.setdefault((ranks, turn), _Meeting(name, ranks, copy))
        assert meeting.name == name, f"rank {rank} came to {name}, others to {meeting.name}"
        return self._join(meeting, rank, buffers)

    def launch(self, kernel: _Kernel) -> None:
        """Put a kernel at the end of its stream, and let the GPUs run."""
        for operation in kernel.operations:
            operation.kernel = kernel
        self.most_operations = max(self.most_operations, len(kernel.operations))
        key = (kernel.rank, () if self.one_stream else kernel.communicator)
        self._streams.setdefault(key, deque()).append(kernel)
        self._run()

    def wait(self, rank: int, what: str, is_over: Callable[[], bool], deadline: Deadline) -> None:
        """Block the host thread of `rank` until `is_over`. Called with the lock held."""
        while not is_over():
            if self.deadlock is not None:
                raise DeadlockError(self.deadlock)
            if rank in self.broken:
                raise RuntimeError("NCCL error: the communicator was aborted")
            if self.abort_reason is not None:
                raise RefitAbortedError(self.abort_reason)
            if deadline.remaining_s() == 0:
                raise TransportTimeoutError(f"rank {rank}: {what} passed its deadline of {deadline.budget_s:g} s")
            self._waiting[rank] = (what, is_over)
            self.notice_deadlock()
            if self.deadlock is None:
                self.changed.wait(deadline.remaining_s())
            self._waiting.pop(rank, None)

    def notice_deadlock(self) -> None:
        """All ranks wait or rest, and what they wait for is not there: nobody is left who could bring it."""
        if not self.notices_deadlock:
            return
        stuck = {rank for rank, (_, is_over) in self._waiting.items() if not is_over()}
        if stuck and len(stuck | self._resting) == self.size and self.abort_reason is None:
            heads = [stream[0].name for stream in self._streams.values() if stream]
            waits = [f"rank {rank} waits for {what}" for rank, (what, _) in sorted(self._waiting.items())]
            self.deadlock = "\n  ".join(["all ranks are stuck", *waits, "at the heads of the streams:", *heads])
            self.changed.notify_all()

    def _join(self, meeting: _Meeting, rank: int, buffers: Buffers) -> _Operation:
        operation = meeting.ends[rank] = _Operation(buffers, meeting)
        self.changed.notify_all()
        return operation

    def _run(self) -> None:
        """Let every running kernel finish what it can, until nothing moves."""
        moved = True
        while moved:
            moved = False
            running = {id(stream[0]): stream for stream in self._streams.values() if stream}
            for stream in list(running.values()):
                kernel = stream[0]
                for operation in kernel.operations:
                    ends = operation.meeting.ends
                    if operation.done or not operation.meeting.is_complete:
                        continue
                    if all(end.kernel is not None and id(end.kernel) in running for end in ends.values()):
                        operation.meeting.copy({rank: end.buffers for rank, end in ends.items()})
                        for end in ends.values():
                            end.done = True
                        moved = True
                if all(operation.done for operation in kernel.operations):
                    kernel.done = True
                    stream.popleft()
                    moved = True
        for queue in self._messages.values():
            while queue and queue[0].is_complete and all(end.done for end in queue[0].ends.values()):
                queue.popleft()
        self.changed.notify_all()


def _deliver(sent: Buffers, landing: Buffers) -> None:
    assert sent[0].numel() == landing[1].numel(), f"{sent[0].numel()} bytes sent, {landing[1].numel()} expected"
    landing[1].copy_(sent[0])


class _Started:
    """An operation that was started; it is over when the kernel that holds it is."""

    def __init__(self, transport: NcclLikeTransport, kernel: _Kernel | None = None) -> None:
        self._transport = transport
        self.kernel = kernel

    def wait(self, deadline: Deadline) -> None:
        if self.kernel is not None:
            self._transport.finish(self.kernel, deadline)


@dataclass
class _Gathered:
    """A message of which the start was asked for, and what the asker holds."""

    src: int
    dst: int
    buffer: Tensor
    started: _Started


class NcclLikeTransport:
    """One rank's end of an NcclHub. Implements `Transport`."""

    in_rounds = True

    def __init__(self, hub: NcclHub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self.device = torch.device("cpu")
        self._hub = hub
        self._everyone = tuple(range(hub.size))
        self._turns: dict[tuple[int, ...], int] = {}
        self._connected: set[tuple[int, ...]] = {self._everyone}
        self._gathered: list[_Gathered] | None = None
        self._first_cause: BaseException | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        assert self._gathered is None, "already inside"
        self._gathered = []
        try:
            yield
            if self._gathered:
                self._start(self._gathered)
        finally:
            self._gathered = None

    def send(self, buffer: Tensor, dst: int) -> _Started:
        check_buffer(buffer, f"send to rank {dst}")
        check_peer(dst, self.rank, self.size, "send")
        return self._message(self.rank, dst, buffer)

    def receive(self, buffer: Tensor, src: int) -> _Started:
        check_buffer(buffer, f"receive from rank {src}")
        check_peer(src, self.rank, self.size, "receive")
        return self._message(src, self.rank, buffer)

    def all_gather(self, output: Tensor, own: Tensor, ranks: tuple[int, ...]) -> _Started:
        check_members(ranks, self.rank, self.size, "all_gather")
        check_gather(output, own, ranks)

        def copy(ends: dict[int, Buffers]) -> None:
            for _, taken in ends.values():
                for place, member in enumerate(ranks):
                    taken[place * own.numel() : (place + 1) * own.numel()].copy_(ends[member][0])

        return self._collective(f"all_gather of {ranks}", ranks, (own, output), copy)

    def broadcast(self, buffer: Tensor, root: int, ranks: tuple[int, ...]) -> _Started:
        check_members(ranks, self.rank, self.size, "broadcast")
        check_buffer(buffer, "broadcast")

        def copy(ends: dict[int, Buffers]) -> None:
            for member in ranks:
                if member != root:
                    _deliver(ends[root], ends[member])

        return self._collective(f"broadcast of {ranks}", ranks, (buffer, buffer), copy)

    def abort(self, reason: str) -> None:
        with self._hub.changed:
            if self._hub.abort_reason is None:
                self._hub.abort_reason = reason
            self._hub.changed.notify_all()

    def close(self) -> None:
        self._hub.rest(self.rank)

    def finish(self, kernel: _Kernel, deadline: Deadline) -> None:
        with self._hub.changed:
            self._wait(kernel.name, lambda: kernel.done, deadline)

    def _message(self, src: int, dst: int, buffer: Tensor) -> _Started:
        with self._hub.changed:
            self._check_usable()
        asked = _Gathered(src, dst, buffer, _Started(self))
        if buffer.numel():
            if self._gathered is None:
                self._start([asked])
            else:
                self._gathered.append(asked)
        return asked.started

    def _start(self, asked: list[_Gathered]) -> None:
        """Connect, where a pair is new, and launch one kernel. Returns once it is on its stream."""
        hub = self._hub
        with hub.changed:
            self._check_usable()
            operations = [hub.message(m.src, m.dst, m.buffer, sends=m.src == self.rank) for m in asked]
            new = [
                operation.meeting
                for operation, message in zip(operations, asked, strict=True)
                if not hub.connected and (message.src, message.dst) not in self._connected
            ]
            what = f"connecting {', '.join(meeting.name for meeting in new)}"
            self._wait(what, lambda: all(meeting.is_complete for meeting in new), Deadline.after(60.0))
            self._connected.update((message.src, message.dst) for message in asked)
            pair = tuple(sorted((asked[0].src, asked[0].dst)))
            kernel = _Kernel(self.rank, pair if hub.pairs_apart else self._everyone, operations)
            for message in asked:
                message.started.kernel = kernel
            hub.launch(kernel)

    def _collective(self, name: str, ranks: tuple[int, ...], buffers: Buffers, copy: Callable[..., None]) -> _Started:
        hub = self._hub
        assert self._gathered is None, "a collective is never started together with messages"
        with hub.changed:
            self._check_usable()
            turn = self._turns.get(ranks, 0)
            self._turns[ranks] = turn + 1
            operation = hub.collective(name, ranks, turn, self.rank, buffers, copy)
            if not hub.connected and ranks not in self._connected:
                self._wait(f"connecting {name}", lambda: operation.meeting.is_complete, Deadline.after(60.0))
                self._connected.add(ranks)
            kernel = _Kernel(self.rank, ranks, [operation])
            hub.launch(kernel)
            return _Started(self, kernel)

    def _wait(self, what: str, is_over: Callable[[], bool], deadline: Deadline) -> None:
        try:
            self._hub.wait(self.rank, what, is_over, deadline)
        except (ReshardError, DeadlockError) as fault:
            self._first_cause = fault
            if self._hub.abort_reason is None:
                self._hub.abort_reason = str(fault)
            self._hub.changed.notify_all()
            raise

    def _check_usable(self) -> None:
        if self._first_cause is not None:
            raise self._first_cause
        if self._hub.abort_reason is not None:
            raise RefitAbortedError(self._hub.abort_reason)
