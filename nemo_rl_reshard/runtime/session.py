"""RankSession: one rank's life in a refit world, from its declaration to any number of refits.

The same for trainers and engines, synchronous and asynchronous: whoever holds the rank forwards these five calls.
Arguments and results are JSON types.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch

from nemo_rl_reshard.errors import HandshakeError, ReshardError, StateError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.runtime.assignment import Assignment
from nemo_rl_reshard.runtime.endpoint import PreparedSource, Source, Target, devices_of
from nemo_rl_reshard.runtime.executor import Executor
from nemo_rl_reshard.runtime.handshake import Agreement
from nemo_rl_reshard.runtime.leftovers import LeftoverMover
from nemo_rl_reshard.runtime.mover import MessageMover
from nemo_rl_reshard.runtime.order import RefitOrder
from nemo_rl_reshard.runtime.report import Phase, RankReport
from nemo_rl_reshard.runtime.round_executor import RoundExecutor
from nemo_rl_reshard.runtime.verify import Verification
from nemo_rl_reshard.runtime.world import Join, Seat, World, join_processes
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.devices import DeviceReport
from nemo_rl_reshard.transport.streams import StreamOrder


class SessionState(StrEnum):
    """NEW -> DECLARED -> PLANNED -> READY -> UPDATING -> READY ... CLOSED; FAILED until the next `connect`."""

    NEW = "new"
    DECLARED = "declared"
    PLANNED = "planned"
    READY = "ready"
    UPDATING = "updating"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class _Joined:
    """The world this rank sits in."""

    world: World
    seat: Seat
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class _Work:
    """An assignment made ready to run in the present world; owns the buffers."""

    assignment: Assignment
    mover: MessageMover
    executor: Executor | RoundExecutor
    leftovers: LeftoverMover
    streams: StreamOrder


class RankSession:
    """One rank. Give a trainer its `source`, an inference rank its `target`; a colocated rank has both.

    `rank` is the rank of the refit world: trainers first. `join` reaches the other ranks and is replaced in tests.
    """

    def __init__(
        self, rank: int, *, source: Source | None = None, target: Target | None = None, join: Join = join_processes
    ) -> None:
        if source is None and target is None:
            raise ValueError(f"rank {rank} needs a source, a target or both")
        self.rank = rank
        self._source = source
        self._target = target
        self._join = join
        self._state = SessionState.NEW
        self._first_cause: BaseException | None = None
        self._version: int | None = None
        self._may_be_mixed = False
        self._held: dict[str, list[Region]] = {}
        self._devices: dict[Side, set[torch.device]] = {}
        self._assignment: Assignment | None = None
        self._generation: int | None = None
        self._joined: _Joined | None = None
        self._work: _Work | None = None
        self._declare_s = 0.0

    @property
    def state(self) -> SessionState:
        """Present state."""
        return self._state

    @property
    def version(self) -> int | None:
        """Version of the last refit that every rank finished; None before the first and after a failed one."""
        return self._version

    @property
    def first_cause(self) -> BaseException | None:
        """What made the session FAILED; None in any other state."""
        return self._first_cause

    @property
    def may_be_mixed(self) -> bool:
        """Whether a refit has opened the target and not finished: it may hold some of the old and some of the new."""
        return self._may_be_mixed

    @property
    def devices(self) -> DeviceReport:
        """Where the declared weights lie, and whether this rank could join NCCL."""
        return DeviceReport.of(set[torch.device]().union(*self._devices.values()))

    def declare(self, specs: Sequence[Sequence[Any]] | None = None) -> dict[str, Any]:
        """This rank's manifest.

        `specs` are the trainers' tensors as `[name, shape, dtype]`, for an inference rank; None for a trainer. Any
        program adopted before is dropped. Raises DeclarationError, TargetError, StateError.
        """
        self._require(
            "declare", SessionState.NEW, SessionState.DECLARED, SessionState.PLANNED, SessionState.READY,
            SessionState.FAILED,
        )  # fmt: skip
        start_s = time.perf_counter()
        if specs is None:
            if self._source is None:
                raise StateError(f"declare: inference rank {self.rank} needs the trainers' specs")
            manifest = self._source.manifest(self.rank)
            self._held = {}
            for shard in manifest.shards:
                self._held.setdefault(shard.tensor, []).append(shard.region)
        else:
            if self._target is None:
                raise StateError(f"declare: trainer rank {self.rank} takes no specs")
            manifest = self._target.manifest(
                self.rank, [TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in specs]
            )
        self._devices[manifest.side] = devices_of(self._source if specs is None else self._target, manifest)
        self._assignment = self._work = None
        if self._state is not SessionState.FAILED:
            self._state = SessionState.DECLARED
        self._declare_s += time.perf_counter() - start_s
        return manifest.to_plain()

    def connect(self, world: Mapping[str, Any]) -> None:
        """Join a refit world; see `World` for the fields. Leaves the previous one for good.

        The way out of FAILED: what the session has declared stays valid if its rank does; what it has adopted, if the
        world's size does too and the transport needs no rounds that it lacks. Raises HandshakeError, TransportError,
        StateError.
        """
        self._require(
            "connect", SessionState.DECLARED, SessionState.PLANNED, SessionState.READY, SessionState.FAILED
        )  # fmt: skip
        joining = World.from_plain(world)
        if joining.transport != "gloo":
            joining = replace(joining, device=self.devices.device)
        if joining.rank != self.rank:
            raise HandshakeError(f"rank {self.rank} was told that it is rank {joining.rank}")
        if self._generation is not None and joining.generation <= self._generation:
            raise HandshakeError(f"rank {self.rank} left generation {self._generation}: {joining.generation} is old")
        start_s = time.perf_counter()
        self._leave()
        self._generation = joining.generation
        try:
            seat = self._join(joining)
        except BaseException as error:
            self._fail(error)
            raise
        self._joined = _Joined(joining, seat, Agreement(seat.transport, seat.store, joining.generation))
        self._first_cause = None
        self._state = SessionState.DECLARED
        if self._assignment is not None and self._assignment.fits(joining.size, in_rounds=seat.transport.in_rounds):
            self._get_ready(self._joined, self._assignment)
        self._declare_s += time.perf_counter() - start_s

    def adopt(self, handout: Mapping[str, Any]) -> str:
        """Lower this rank's program from the plan in `handout`, which is not kept; returns the plan's digest.

        `handout` is `Handout.of_rank`. Raises PlanError for a malformed one, a plan that was changed on the way or
        another rank's part, HandshakeError for one of another world.
        """
        self._require("adopt", SessionState.DECLARED, SessionState.PLANNED, SessionState.READY)
        assignment = Assignment.from_plain(handout, self.rank)
        if self._joined is None:
            self._assignment = assignment
            self._state = SessionState.PLANNED
        else:
            self._get_ready(self._joined, assignment)
        return assignment.program.digest

    def refit(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Bring the target to the trainers' weights: `{version, verify, deadline_s, seed}` in, this rank's report out.

        Returns only after every rank finished; from then on `version` is the order's. Any failure is raised here and
        on every other rank, calls the refit off everywhere, leaves the target abandoned and the session FAILED.
        """
        self._require("refit", SessionState.READY)
        assert self._joined is not None
        assert self._work is not None
        asked = RefitOrder.from_plain(order)
        self._state = SessionState.UPDATING
        self._version = None
        report = RankReport(self.rank, asked.version)
        report.phases[Phase.DECLARE], self._declare_s = self._declare_s, 0.0
        start_s = time.perf_counter()
        try:
            self._update(self._joined, self._work, asked, report)
        except BaseException as error:
            self._fail(error)
            raise
        report.seconds = time.perf_counter() - start_s
        self._version = asked.version
        self._may_be_mixed = False
        self._state = SessionState.READY
        return report.to_plain()

    def close(self) -> None:
        """Leave the world and drop plan and buffers. Safe in every state, and twice."""
        self._leave()
        self._assignment = None
        self._state = SessionState.CLOSED

    def _update(self, joined: _Joined, work: _Work, order: RefitOrder, report: RankReport) -> None:
        """One refit, between its two agreements."""
        deadline = Deadline.after(order.deadline_s)
        with report.timing(Phase.DECLARE):
            joined.agreement.reach("the coming refit", _statement(joined.world, work.assignment, order), deadline)
        work.streams.begin()
        for device in set[torch.device]().union(*self._devices.values()):
            work.streams.meet(device)
        verification = Verification.of(order, joined.seat.transport)
        with self._prepared_source(report), self._open_target(order.version, report):
            work.executor.run(deadline, report, verification)
            with report.timing(Phase.VERIFY):
                verification.compare(deadline)
            with report.timing(Phase.LEFTOVER):
                work.leftovers.run(deadline, report, verification)
            with report.timing(Phase.VERIFY):
                work.leftovers.compare(deadline, verification)
            with report.timing(Phase.INSTALL):
                if self._target is not None:
                    self._target.finish(order.version)
                work.streams.settle(deadline, "installing the weights")  # whoever reads them next may use any stream
                joined.agreement.reach("having finished", {"version": order.version}, deadline)
        report.num_verified = verification.num_compared
        staging = work.mover.extra_bytes + work.leftovers.extra_bytes
        report.peak_extra_bytes = staging + int(getattr(self._target, "peak_extra_bytes", 0))

    @contextmanager
    def _prepared_source(self, report: RankReport) -> Iterator[None]:
        """The source with what its computed values take, if it computes any. Every trainer has agreed to come here."""
        if not isinstance(self._source, PreparedSource):
            yield
            return
        try:
            with report.timing(Phase.LEFTOVER):
                self._source.prepare()
            yield
        finally:
            self._source.release()

    @contextmanager
    def _open_target(self, version: int, report: RankReport) -> Iterator[None]:
        """The target between `begin` and the other ranks' agreement; abandoned unless all of it went well."""
        if self._target is None:
            yield
            return
        try:
            # First: a target that fails to open may have written already.
            self._may_be_mixed = True
            with report.timing(Phase.INSTALL):
                self._target.begin(version)
            yield
        except BaseException as error:
            self._fail(error)  # first, so that nobody waits for an engine that is being put back
            try:
                self._target.abandon()
            except Exception as second:
                error.add_note(f"abandoning the target failed too: {second!r}")
            raise

    def _get_ready(self, joined: _Joined, assignment: Assignment) -> None:
        """Set up what runs `assignment` in the present world."""
        if assignment.num_ranks != joined.world.size:
            raise HandshakeError(
                f"rank {self.rank} sits in a world of {joined.world.size} and was given a plan for "
                f"{assignment.num_ranks} ranks"
            )
        transport = joined.seat.transport
        streams = StreamOrder()
        mover = MessageMover(
            assignment.program,
            transport,
            streams,
            source=self._source,
            target=self._target,
            held=self._held,
            in_flight=assignment.in_flight,
            bucket_bytes=assignment.bucket_bytes,
        )
        executor: Executor | RoundExecutor = Executor(mover)
        if transport.in_rounds:
            executor = RoundExecutor(mover, transport, assignment)
        leftovers = LeftoverMover(assignment.leftovers, transport, streams, source=self._source, target=self._target)
        self._assignment = assignment
        self._work = _Work(assignment, mover, executor, leftovers, streams)
        self._state = SessionState.READY

    def _fail(self, error: BaseException) -> None:
        """Keep the first cause and call the refit off on every other rank."""
        if self._first_cause is None:
            self._first_cause = error
        self._state = SessionState.FAILED
        reason = f"rank {self.rank}: {type(error).__name__}: {error}"
        if self._joined is not None:
            with suppress(ReshardError):
                self._joined.seat.transport.abort(reason)

    def _leave(self) -> None:
        """Drop transport and buffers; the weights stay."""
        self._work = None
        if self._joined is not None:
            self._joined.seat.leave()
            self._joined = None

    def _require(self, call: str, *states: SessionState) -> None:
        if self._state in states:
            return
        cause = f" since {self._first_cause}" if self._state is SessionState.FAILED else ""
        allowed = ", ".join(states)
        raise StateError(f"{call}: rank {self.rank} is {self._state}{cause}; it may be called when {allowed}")


def _statement(world: World, assignment: Assignment, order: RefitOrder) -> dict[str, Any]:
    """What a rank believes about the coming refit, to be compared with every other rank's."""
    return {
        **assignment.statement(),
        **order.to_plain(),
        "world_size": world.size,
        "num_trainers": world.num_trainers,
        "transport": world.transport,
        "generation": world.generation,
    }
