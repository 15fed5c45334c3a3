"""Rounds: the messages that ranks start together on a transport whose streams run one thing after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_rl_reshard.plan.transfer import Message, RankProgram

LARGEST_ROUND_BYTES = (1 << 32) - 1
"""Per rank and direction. Libraries that fuse what is started together have hung beyond 32 bits."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """`messages` is the most that one rank sends, and the most that it receives, in a round; `under_way` is how many
    rounds may be started and not finished. Their product is at most `in_flight`, and fits the staging of a bucket.
    """

    messages: int
    under_way: int

    @classmethod
    def of(cls, *, in_flight: int, bucket_bytes: int, message_bytes: int) -> RoundLimits:
        """The limits that follow from sizes on which all ranks agree."""
        staged = max(1, min(in_flight, bucket_bytes // message_bytes))
        # Two, so that one is packed while the other is on the wire.
        under_way = min(2, staged)
        return cls(max(1, min(staged // under_way, LARGEST_ROUND_BYTES // message_bytes)), under_way)


def round_starts(programs: Iterable[RankProgram], messages: int) -> tuple[int, ...]:
    """Orders at which rounds begin, ascending: the same for all ranks, found from the programs of all of them.

    A round is an interval of the order that all ranks share, so both ends of a message are in the same one. It lies
    inside one step, so nothing in it is forwarded in it; no rank sends more than `messages` in it, or receives more.
    Local copies count as nothing.
    """
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


def round_of(order: int, starts: Sequence[int]) -> int:
    """The round in which the message of `order` is started; -1 for a local copy before the first."""
    return bisect_right(starts, order) - 1
