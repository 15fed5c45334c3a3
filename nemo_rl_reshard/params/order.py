"""Model order of the tensors of one side, from the orders in which its ranks hold their parts of the model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

_NUMBER = re.compile(r"\.(\d+)\.")


def model_order(sequences: Sequence[Sequence[str]]) -> list[str]:
    """One order of all names that keeps the order inside every sequence.

    Where the sequences leave it open (experts on different ranks, pipeline stages), lower layer numbers come first,
    then what an earlier sequence names first. Sequences that contradict each other are followed as far as possible.
    """
    if len(sequences) == 1:
        return list(dict.fromkeys(sequences[0]))
    followers: defaultdict[str, list[str]] = defaultdict(list)
    waiting: dict[str, int] = {}
    for sequence in sequences:
        previous: str | None = None
        for name in dict.fromkeys(sequence):
            waiting.setdefault(name, 0)
            if previous is not None:
                followers[previous].append(name)
                waiting[name] += 1
            previous = name
    priority = {name: (_layer(name), position, name) for position, name in enumerate(waiting)}
    ready = [priority[name] for name, count in waiting.items() if count == 0]
    heapify(ready)
    order: list[str] = []
    while waiting:
        # Nothing ready means the sequences contradict each other: go on with what would come first.
        name = heappop(ready)[2] if ready else min(priority[name] for name in waiting)[2]
        if waiting.pop(name, None) is None:
            continue
        order.append(name)
        for follower in followers[name]:
            if follower in waiting:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    heappush(ready, priority[follower])
    return order


def _layer(name: str) -> int:
    """The first number in a name, which is its layer; -1 for names without one."""
    found = _NUMBER.search(name)
    return int(found.group(1)) if found else -1
