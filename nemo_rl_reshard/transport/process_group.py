"""ProcessGroupTransport: one rank's end of a refit world over torch process groups that belong to this refit alone."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_rl_reshard.errors import (
    HandshakeError,
    RefitAbortedError,
    ReshardError,
    TransportError,
    TransportTimeoutError,
)
from nemo_rl_reshard.transport.abort_watcher import AbortWatcher, abort_key
from nemo_rl_reshard.transport.backends import MAX_TAG, make_backend
from nemo_rl_reshard.transport.buffers import check_buffer, check_gather, check_members, check_peer
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.rendezvous import RendezvousStore
from nemo_rl_reshard.transport.started_work import Asked, Start, StartedWork

_FIRST_CAUSE_GRACE_S = 0.5
"""How long a rank that lost a connection waits for the reason. A peer that gives up closes its connections a moment
before it can publish why; a peer that was killed never says."""
_CONNECTING_SLACK_S = 2.0
"""What a backend gets beyond the deadline to say itself that connecting took too long."""
_GLOO_NOISE = re.compile(r"^\[/\S+\] |\. This is typically caused by .*", re.DOTALL)
"""The build path that gloo puts before a message, and the advice after it."""


class ProcessGroupTransport:
    """Implements `Transport` over gloo (CPU tensors) or NCCL (CUDA tensors).

    The keys of one `generation` in the store belong to one set of groups: after a failure every rank closes its
    transport and builds a new one under the next generation. The store stays the caller's and may be used again.
    """

    def __init__(
        self,
        store: RendezvousStore,
        rank: int,
        size: int,
        *,
        host: str,
        timeout_s: float,
        backend: str = "gloo",
        device: str = "cpu",
        generation: int = 0,
    ) -> None:
        """Meet all `size` ranks; blocks until they are connected.

        `host` is this rank's own address, on which gloo listens; `device` is where NCCL's bytes lie. No operation may
        take longer than `timeout_s`, whatever its deadline. Raises TransportTimeoutError naming the ranks that did not
        come, HandshakeError if ranks disagree on the world, RefitAbortedError if another rank called the generation
        off, TransportError if the backend cannot work here.
        """
        if not 0 <= rank < size:
            raise TransportError(f"rank {rank} is not in a world of {size}")
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._everyone = tuple(range(size))
        self._store = store
        self._timeout_s = timeout_s
        self._namespace = f"refit/{generation}"
        self._abort_key = abort_key(generation)
        self._lock = threading.Lock()
        self._first_cause: ReshardError | None = None
        self._closed = False
        self._groups: dict[tuple[int, ...], Any] = {}
        self._building: Future[Any] | None = None
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._started: set[StartedWork] = set()
        self._called_off = threading.Event()
        self._together: list[Asked] | None = None
        self._connected: set[tuple[int, ...]] = set()
        self._backend = make_backend(backend, host, self.device)
        self.in_rounds = self._backend.in_rounds
        self._kind = backend
        store.stop_key = self._abort_key
        self._watcher = AbortWatcher(store.connect(), self._abort_key, self._on_abort, self._on_lost)
        try:
            self._group(self._everyone)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Transport.together`. Nothing is started before the end, so that an error inside leaves nothing open."""
        if not self.in_rounds:
            yield
            return
        asked: list[Asked] = []
        self._together = asked
        try:
            yield
        finally:
            self._together = None
        self._start_together(asked)

    def send(self, buffer: Tensor, dst: int) -> StartedWork:
        """See `Transport.send`."""
        check_buffer(buffer, f"send to rank {dst}", self.device)
        check_peer(dst, self.rank, self.size, "send")
        group = self._group(self._everyone)
        tag = self._next_tag(self._sent, dst)
        return self._start_message(
            f"send to rank {dst}", (self.rank, dst), buffer, lambda: group.send([buffer], dst, tag)
        )

    def receive(self, buffer: Tensor, src: int) -> StartedWork:
        """See `Transport.receive`."""
        check_buffer(buffer, f"receive from rank {src}", self.device)
        check_peer(src, self.rank, self.size, "receive")
        group = self._group(self._everyone)
        tag = self._next_tag(self._received, src)
        return self._start_message(
            f"receive from rank {src}", (src, self.rank), buffer, lambda: group.recv([buffer], src, tag)
        )

    def all_gather(self, output: Tensor, own: Tensor, ranks: tuple[int, ...]) -> StartedWork:
        """See `Transport.all_gather`."""
        check_members(ranks, self.rank, self.size, "all_gather")
        check_gather(output, own, ranks, self.device)
        what = f"all_gather among ranks {ranks}"
        if len(ranks) == 1:
            output.copy_(own)
            return StartedWork(self.finish, what, None, ())
        group = self._group(ranks)
        return self._start(what, (output, own), lambda: group._allgather_base(output, own), ranks)

    def broadcast(self, buffer: Tensor, root: int, ranks: tuple[int, ...]) -> StartedWork:
        """See `Transport.broadcast`."""
        check_members(ranks, self.rank, self.size, "broadcast")
        check_buffer(buffer, "broadcast", self.device)
        if root not in ranks:
            raise TransportError(f"broadcast: root {root} is not among the members {ranks}")
        what = f"broadcast from rank {root} among ranks {ranks}"
        if len(ranks) == 1:
            return StartedWork(self.finish, what, None, ())
        group = self._group(ranks)
        options = dist.BroadcastOptions()
        options.rootRank = ranks.index(root)
        options.rootTensor = 0
        return self._start(what, (buffer,), lambda: group.broadcast([buffer], options), ranks)

    def abort(self, reason: str) -> None:
        """See `Transport.abort`. If the rendezvous is gone, only this rank is woken; the others have deadlines."""
        self._on_abort(self._publish(reason))

    def close(self) -> None:
        """See `Transport.close`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            healthy = self._first_cause is None
            if healthy:
                self._first_cause = TransportError(f"rank {self.rank}: the transport is closed")
        self._called_off.set()
        self._watcher.stop()
        if self._store.stop_key == self._abort_key:
            self._store.stop_key = None
        if self._started:
            self._break_off()
        elif healthy:
            for group in self._groups.values():
                self._backend.leave(group)
        self._groups.clear()
        self._started.clear()

    def finish(self, started: StartedWork, deadline: Deadline) -> None:
        """Wait for `started` and let its buffers go. Raises as `Pending.wait` does, after calling the refit off."""
        try:
            self._backend.wait(started.work, deadline, self._called_off)
        except (RuntimeError, TimeoutError) as fault:
            raise self._explain(started.what, fault, deadline.budget_s) from fault
        self._started.discard(started)

    def _start_message(self, what: str, pair: tuple[int, int], buffer: Tensor, start: Start) -> StartedWork:
        if not self.in_rounds:
            return self._start(what, (buffer,), start)
        self._raise_if_unusable()
        started = StartedWork(self.finish, what, None, (buffer,))
        if buffer.numel():
            asked = Asked(started, pair, start)
            if self._together is None:
                self._start_together([asked])
            else:
                self._together.append(asked)
        return started

    def _start_together(self, asked: Sequence[Asked]) -> None:
        """Start messages that end as one."""
        if not asked:
            return
        self._raise_if_unusable()
        group = self._group(self._everyone)
        what = ", ".join(each.started.what for each in asked)
        with self._starting(what, {each.pair for each in asked}):
            work = self._backend.start_together(group, [each.start for each in asked])
        for each in asked:
            each.started.work = work
            self._started.add(each.started)

    def _start(self, what: str, buffers: tuple[Tensor, ...], start: Start, ranks: tuple[int, ...] = ()) -> StartedWork:
        self._raise_if_unusable()
        if buffers[0].numel() == 0:
            return StartedWork(self.finish, what, None, ())
        with self._starting(what, {ranks}):
            work = start()
        started = StartedWork(self.finish, what, work, buffers)
        self._started.add(started)
        return started

    @contextmanager
    def _starting(self, what: str, places: AbstractSet[tuple[int, ...]]) -> Iterator[None]:
        """Explain what fails inside. Where messages go in rounds, the first use of a place (a pair that exchanges
        messages, the ranks of a collective) connects there, and blocks until the other ranks start theirs: no longer
        than any operation may take."""
        late = None
        if self.in_rounds and not places <= self._connected:
            late = threading.Timer(self._timeout_s, self._fail, [self._too_late(f"connecting for {what}")])
            late.daemon = True
            late.start()
        try:
            yield
        except RuntimeError as fault:
            raise self._explain(what, fault, self._timeout_s) from fault
        finally:
            if late is not None:
                late.cancel()
        self._connected |= places

    def _too_late(self, what: str) -> TransportTimeoutError:
        return TransportTimeoutError(f"rank {self.rank}: {what} passed its deadline of {self._timeout_s:g} s")

    def _next_tag(self, counter: Counter[int], peer: int) -> int:
        """Number the messages of a pair, so that the n-th send meets the n-th receive."""
        tag = counter[peer] % MAX_TAG
        counter[peer] += 1
        return tag

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """The group of `ranks`, built when first asked for. Every member asks at the same place in its program."""
        self._raise_if_unusable()
        group = self._groups.get(ranks)
        if group is not None or len(ranks) == 1:
            return group
        place = f"{self._namespace}/group/{'.'.join(map(str, ranks))}"
        deadline = Deadline.after(self._timeout_s)
        self._meet(place, ranks, deadline)
        try:
            store = dist.PrefixStore(place, self._store)  # type: ignore[attr-defined]
            group = self._build(store, ranks.index(self.rank), len(ranks), deadline)
        except (RuntimeError, TimeoutError, TransportError) as fault:
            raise self._explain(f"connecting ranks {ranks}", fault, self._timeout_s) from fault
        with self._lock:
            self._groups[ranks] = group
            unusable = self._first_cause is not None
        if unusable:  # an abort came while the group was not yet there to be broken off
            self._backend.break_off(group)
            self._raise_if_unusable()
        return group

    def _build(self, store: Any, index: int, size: int, deadline: Deadline) -> Any:
        """Build a group in a thread of its own, and leave as soon as the refit is called off.

        gloo cannot be interrupted while it connects: a member that gave up meanwhile would cost the whole timeout.
        The thread that is left behind ends by that timeout.
        """
        built: Future[Any] = Future()

        def connect() -> None:
            try:
                group = self._backend.build(store, index, size, max(0.001, deadline.remaining_s()))
            except BaseException as fault:  # for the waiting thread, which raises it
                outcome: Callable[[], None] = partial(built.set_exception, fault)
            else:
                outcome = partial(built.set_result, group)
            with suppress(InvalidStateError):  # called off meanwhile
                outcome()

        with self._lock:
            cause, self._building = self._first_cause, built
        if cause is not None:
            raise cause
        threading.Thread(target=connect, name="refit-connect", daemon=True).start()
        try:
            # gloo keeps the time itself and says more; NCCL does not keep it.
            return built.result(deadline.remaining_s() + _CONNECTING_SLACK_S)
        finally:
            self._building = None

    def _meet(self, place: str, ranks: tuple[int, ...], deadline: Deadline) -> None:
        """Wait until every member is at `place` with the same idea of the world; name those that are not."""
        own = f"world of {self.size} over {self._kind}, members {ranks}"
        keys = {member: f"{place}/present/{member}" for member in ranks}
        try:
            self._store.set(keys[self.rank], own)
            try:
                self._store.wait(list(keys.values()), deadline.remaining())
            except TransportTimeoutError as fault:
                absent = [member for member, key in keys.items() if not self._store.check([key])]
                raise TransportTimeoutError(f"ranks {absent} did not come within {deadline.budget_s:g} s") from fault
            others = {member: self._store.get(key).decode() for member, key in keys.items()}
        except TransportError as fault:
            raise self._explain(f"meeting ranks {ranks}", fault, deadline.budget_s) from fault
        different = [f"rank {member} has a {other}" for member, other in others.items() if other != own]
        if different:
            cause = HandshakeError(f"rank {self.rank} has a {own}, but {'; '.join(different)}")
            self._fail(cause)
            raise cause

    def _explain(self, what: str, fault: Exception, budget_s: float) -> ReshardError:
        """The error to raise for `fault`; the first failure of this rank calls the refit off for all ranks."""
        timed_out = isinstance(fault, TimeoutError | TransportTimeoutError) or "timed out" in str(fault).lower()
        known: ReshardError | None = self._first_cause or (fault if isinstance(fault, RefitAbortedError) else None)
        if known is None and not timed_out:
            known = self._reason_of_others()
        if known is None:
            message = _GLOO_NOISE.sub("", str(fault))
            if isinstance(fault, TransportTimeoutError):
                known = TransportTimeoutError(f"rank {self.rank}: {what}: {message}")
            elif timed_out:
                known = TransportTimeoutError(f"rank {self.rank}: {what} passed its deadline of {budget_s:g} s")
            else:
                known = TransportError(f"rank {self.rank}: {what} failed: {message}")
        self._fail(known)
        return self._first_cause or known

    def _reason_of_others(self) -> RefitAbortedError | None:
        """What another rank gave as its reason, if it does so within the grace time."""
        try:
            self._store.wait([self._abort_key], timedelta(seconds=_FIRST_CAUSE_GRACE_S))
            return RefitAbortedError(self._store.get(self._abort_key).decode())
        except (HandshakeError, TransportError):
            return None

    def _fail(self, cause: ReshardError) -> None:
        """Keep the first cause, tell every rank, and break all groups off. Safe from any thread."""
        with self._lock:
            first = self._first_cause is None
            if first:
                self._first_cause = cause
            building = self._building
        self._called_off.set()
        if building is not None:
            with suppress(InvalidStateError):  # it was built at the last moment
                building.set_exception(cause)
        if first:
            self._publish(str(cause))
            self._break_off()

    def _publish(self, reason: str) -> str:
        """Write the abort key unless another rank has; return what it holds."""
        try:
            return self._store.compare_set(self._abort_key, "", reason or "aborted without a reason").decode()
        except (HandshakeError, TransportError):
            return reason

    def _on_abort(self, reason: str) -> None:
        self._fail(RefitAbortedError(reason))

    def _on_lost(self, fault: TransportError) -> None:
        self._fail(TransportError(f"rank {self.rank} lost the rendezvous of its refit: {fault}"))

    def _break_off(self) -> None:
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            self._backend.break_off(group)

    def _raise_if_unusable(self) -> None:
        if self._first_cause is not None:
            raise self._first_cause
