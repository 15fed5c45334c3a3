"""RoundExecutor: runs one rank's messages in rounds, for transports whose streams run one thing after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.plan.rounds import LARGEST_ROUND_BYTES, round_of
from nemo_rl_reshard.plan.transfer import Message
from nemo_rl_reshard.runtime.assignment import Assignment
from nemo_rl_reshard.runtime.mover import MessageMover
from nemo_rl_reshard.runtime.report import RankReport
from nemo_rl_reshard.runtime.steps import NOTHING, Outgoing, Steps
from nemo_rl_reshard.runtime.verify import Verification
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport


@dataclass
class _Round:
    """One rank's messages of one round, in plan order."""

    incoming: list[Message] = field(default_factory=list)
    outgoing: list[Outgoing] = field(default_factory=list)

    @property
    def after(self) -> int:
        """Order of the last receive that the round waits for."""
        return max((step.after for step in self.outgoing), default=NOTHING)


class RoundExecutor:
    """One rank's messages, ready to run any number of times.

    Rounds are the same on all ranks. A rank starts the messages of a round together, and before that it waits for
    nothing but its own earlier rounds: for a slot of theirs, or for what it forwards. So by induction every rank comes
    to every round, whose messages then have both ends started, and need no later one: nothing can deadlock.
    """

    def __init__(self, mover: MessageMover, transport: Transport, assignment: Assignment) -> None:
        """Raises PlanError if one message is more than a round may carry, or the driver cut no rounds."""
        largest = assignment.program.message_bytes
        if largest > LARGEST_ROUND_BYTES:
            raise PlanError(f"message_bytes {largest} is more than {LARGEST_ROUND_BYTES}, the most of a round")
        if assignment.round_starts is None:
            raise PlanError(
                f"rank {transport.rank}: this transport goes in rounds and the plan was handed out without; call "
                "hand_out with in_rounds=True"
            )
        self._mover = mover
        self._transport = transport
        self._limits = assignment.round_limits
        self._rounds = _rounds_of(mover.steps, assignment.round_starts)

    def run(self, deadline: Deadline, report: RankReport, verification: Verification) -> None:
        """Move everything once. Raises what the transport, the source or the target raises."""
        self._mover.begin()
        under_way: deque[_Round] = deque()
        arrived = NOTHING
        for each in self._rounds:
            while under_way and (len(under_way) == self._limits.under_way or each.after > arrived):
                arrived = max(arrived, self._finish(under_way.popleft(), deadline, report, verification))
            if each.after > arrived:
                raise PlanError(f"message {each.after} is forwarded in the round in which it arrives")
            self._start(each, deadline, report, verification)
            under_way.append(each)
        while under_way:
            self._finish(under_way.popleft(), deadline, report, verification)

    def _start(self, each: _Round, deadline: Deadline, report: RankReport, verification: Verification) -> None:
        ready = [self._mover.ready_receive(message, report, verification) for message in each.incoming]
        for step in each.outgoing:
            flight = self._mover.ready_send(step, deadline, report, verification)
            if flight is not None:
                ready.append(flight)
        with self._transport.together():
            for flight in ready:
                self._mover.start(flight, report)

    def _finish(self, each: _Round, deadline: Deadline, report: RankReport, verification: Verification) -> int:
        """Wait for a round; returns the order of its last receive."""
        arrived = NOTHING
        for _ in each.incoming:
            arrived = self._mover.finish_receive(deadline, report, verification)
        for step in each.outgoing:
            if step.message.src != step.message.dst:
                self._mover.finish_send(deadline, report)
        return arrived


def _rounds_of(steps: Steps, starts: Sequence[int]) -> list[_Round]:
    """This rank's part of every round that it takes part in, ascending."""
    found: dict[int, _Round] = {}
    for message in steps.incoming:
        found.setdefault(round_of(message.order, starts), _Round()).incoming.append(message)
    for step in steps.outgoing:
        found.setdefault(round_of(step.message.order, starts), _Round()).outgoing.append(step)
    return [found[number] for number in sorted(found)]
