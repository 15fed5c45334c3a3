"""Rounds found the plain way, from the programs of all ranks: the yardstick of the package's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nemo_rl_reshard.plan.transfer import Message, RankProgram


def greedy_rounds(programs: Iterable[RankProgram], messages: int) -> tuple[int, ...]:
    """Go through all messages in order; begin a round where a step does, or where an end has had its share."""
    everything: dict[int, Message] = {}
    for program in programs:
        everything.update({message.order: message for message in program.messages if message.src == program.rank})
    starts: list[int] = []
    step = None
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for order in sorted(everything):
        message = everything[order]
        if message.src == message.dst:
            continue
        if message.step != step or sent[message.src] == messages or received[message.dst] == messages:
            starts.append(order)
            step = message.step
            sent.clear()
            received.clear()
        sent[message.src] += 1
        received[message.dst] += 1
    return tuple(starts)
