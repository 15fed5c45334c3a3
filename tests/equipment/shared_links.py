"""SharedLinks: messages on their way over links of bounded rate, pairs of ranks sharing each link max-min fairly."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np

AT_ONCE = 1e-12
"""Seconds. What ends closer together ends at once."""


@dataclass(frozen=True)
class Road:
    """What the messages of one pair of ranks go through: a link at the sender and one at the receiver.

    Links are any names; those of one road have one rate, in bytes per second. Roads of several pairs may share both.
    """

    leaves: Hashable
    enters: Hashable
    bytes_per_s: float
    pair: tuple[int, int]


class SharedLinks:
    """The messages of a road follow each other; those of different roads run side by side.

    Rates are max-min fair: none could be higher without taking from one that is no higher.
    """

    def __init__(self, roads: Iterable[Road]) -> None:
        self._roads = {road: index for index, road in enumerate(dict.fromkeys(roads))}
        links: dict[Hashable, int] = {}
        rates: dict[int, float] = {}
        ends = np.zeros((2, len(self._roads)), dtype=np.int64)
        for road, index in self._roads.items():
            for side, name in enumerate((("out", road.leaves), ("in", road.enters))):
                ends[side, index] = link = links.setdefault(name, len(links))
                rates[link] = road.bytes_per_s
        self._leaves, self._enters = ends
        self._capacity = np.array([rates[link] for link in range(len(links))])
        self._queues: list[deque[tuple[Hashable, float]]] = [deque() for _ in self._roads]
        self._left = np.zeros(len(self._roads))
        self._rate = np.zeros(len(self._roads))
        self._is_stale = False
        self._now = 0.0

    def add(self, road: Road, name: Hashable, nbytes: float) -> None:
        """A message joins its road now."""
        index = self._roads[road]
        self._queues[index].append((name, nbytes))
        if len(self._queues[index]) == 1:
            self._left[index] = nbytes
            self._is_stale = True

    def next_end(self) -> float:
        """When the next message will have left its sender if none is added before; infinity if none is under way."""
        self._share()
        busy = self._rate > 0
        return self._now + float((self._left[busy] / self._rate[busy]).min()) if busy.any() else np.inf

    def go_to(self, now: float) -> list[Hashable]:
        """Let time pass until `now`, at most `next_end()`; the messages that end then."""
        self._share()
        self._left -= self._rate * (now - self._now)
        self._now = now
        ended = []
        for index in np.flatnonzero((self._rate > 0) & (self._left <= self._rate * AT_ONCE)):
            queue = self._queues[index]
            ended.append(queue.popleft()[0])
            self._left[index] = queue[0][1] if queue else 0.0
            self._is_stale = self._is_stale or not queue
        return ended

    def _share(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        self._rate[:] = 0
        capacity = self._capacity.copy()
        rest = np.array([index for index, queue in enumerate(self._queues) if queue], dtype=np.int64)
        while rest.size:
            users = self._users(rest)
            share = np.divide(capacity, users, out=np.full(len(capacity), np.inf), where=users > 0)
            least = share.min()
            is_full = share <= least * (1 + 1e-9)
            stopped = is_full[self._leaves[rest]] | is_full[self._enters[rest]]
            self._rate[rest[stopped]] = least
            capacity = np.maximum(capacity - least * self._users(rest[stopped]), 0.0)
            rest = rest[~stopped]

    def _users(self, roads: np.ndarray) -> np.ndarray:
        """By link, how many of `roads` go through it."""
        size = len(self._capacity)
        return np.bincount(self._leaves[roads], minlength=size) + np.bincount(self._enters[roads], minlength=size)
