"""Rounds: the messages that ranks start together on a transport whose streams run one thing after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_rl_reshard.plan.lower import numbered_ranks, order_of
from nemo_rl_reshard.plan.message_counts import IntArray, MessageCounts, message_counts
from nemo_rl_reshard.plan.plan import Plan

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


def round_starts(plan: Plan, messages: int) -> tuple[int, ...]:
    """Orders at which rounds begin, ascending: the same for all ranks, found without the program of any.

    A round is an interval of the order that all ranks share, so both ends of a message are in the same one. It lies
    inside one step, so nothing in it is forwarded in it; no rank sends more than `messages` in it, or receives more.
    Local copies count as nothing. Each round is as long as that allows.
    """
    world = numbered_ranks(plan)
    return tuple(start for counts in message_counts(plan) for start in _starts_of(counts, world, messages))


def round_of(order: int, starts: Sequence[int]) -> int:
    """The round in which the message of `order` is started; -1 for a local copy before the first."""
    return bisect_right(starts, order) - 1


def _starts_of(counts: MessageCounts, world: int, messages: int) -> list[int]:
    """The rounds of some steps, as orders."""
    entry = np.repeat(np.arange(len(counts.count)), counts.count)
    if not len(entry):
        return []
    turn = np.arange(len(entry)) - np.repeat(np.cumsum(counts.count) - counts.count, counts.count)
    step, src, dst = counts.step[entry], counts.src[entry], counts.dst[entry]
    order = order_of(step, turn, src, dst, world)
    by_order = np.argsort(order)
    order, step, src, dst = order[by_order], step[by_order], src[by_order], dst[by_order]
    # A round that holds message i cannot begin at `full[i]` or before: one end of i would then have had its share.
    full = np.maximum(_earlier(step * world + src, messages), _earlier(step * world + dst, messages))
    num = len(order)
    end = np.searchsorted(step, step, side="right")
    # So one that begins at i ends before the first message whose `full` is i or later.
    first = np.full(num, num)
    is_full = np.flatnonzero(full >= 0)[::-1]
    first[full[is_full]] = is_full  # backwards, so that of several the first one stays
    following = np.minimum(np.minimum.accumulate(first[::-1])[::-1], end)
    starts = []
    at = 0
    while at < num:
        starts.append(at)
        at = int(following[at])
    found: list[int] = order[starts].tolist()
    return found


def _earlier(key: IntArray, places: int) -> IntArray:
    """For each entry, the index of the one that is `places` before it among those of equal key; -1 if none is."""
    by_key = np.argsort(key, kind="stable")
    ordered = key[by_key]
    found = np.full(len(key), -1)
    if len(key) > places:
        is_same = ordered[places:] == ordered[:-places]
        found[by_key[places:][is_same]] = by_key[:-places][is_same]
    return found
