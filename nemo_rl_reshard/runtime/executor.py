"""Executor: runs one rank's messages in plan order, many in flight, packing while others are on the wire."""

from __future__ import annotations

from collections import deque

from nemo_rl_reshard.runtime.mover import MessageMover
from nemo_rl_reshard.runtime.report import RankReport
from nemo_rl_reshard.runtime.steps import NOTHING
from nemo_rl_reshard.runtime.verify import Verification
from nemo_rl_reshard.transport.deadline import Deadline


class Executor:
    """One rank's messages, ready to run any number of times, each started and finished on its own.

    Receives are posted as early as the window allows and both windows are emptied in plan order. The smallest message
    that is not complete anywhere is therefore always started at both of its ends, and no window can deadlock.

    At most `in_flight` sends and as many receives are under way.
    """

    def __init__(self, mover: MessageMover) -> None:
        self._mover = mover

    def run(self, deadline: Deadline, report: RankReport, verification: Verification) -> None:
        """Move everything once. Raises what the transport, the source or the target raises."""
        mover = self._mover
        mover.begin()
        incoming, outgoing = deque(mover.steps.incoming), deque(mover.steps.outgoing)
        arrived = NOTHING
        while incoming or outgoing or mover.receiving.under_way or mover.sending.under_way:
            while incoming and mover.receiving.has_room:
                mover.start(mover.ready_receive(incoming.popleft(), report, verification), report)
            if outgoing and outgoing[0].after <= arrived and mover.sending.has_room:
                flight = mover.ready_send(outgoing.popleft(), deadline, report, verification)
                if flight is not None:
                    mover.start(flight, report)
            elif self._receives_first():
                arrived = mover.finish_receive(deadline, report, verification)
            else:
                mover.finish_send(deadline, report)

    def _receives_first(self) -> bool:
        """Whether the oldest message under way is a receive."""
        receiving, sending = self._mover.receiving.under_way, self._mover.sending.under_way
        if not sending or not receiving:
            return bool(receiving)
        return receiving[0].message.order < sending[0].message.order
