"""The best possible balance of senders, by max-flow: a yardstick for the planner's own choice."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from fractions import Fraction

from nemo_rl_reshard.plan.kinds import Kind


def least_maximum(kinds: Iterable[Kind]) -> float:
    """Bytes that the busiest network sender must send at least, when each byte enters each domain once, unrelayed."""
    loads: Counter[tuple[int, ...]] = Counter()
    for kind in kinds:
        by_role: Counter[tuple[int, ...]] = Counter()
        for demand in kind.demands:
            if not demand.near:
                by_role[demand.holders] += demand.region.numel * kind.item_size
        for crew, count in kind.casts():
            for roles, nbytes in by_role.items():
                loads[tuple(sorted(crew[role] for role in roles))] += nbytes * count
    return float(least_peak(loads))


def least_peak(loads: Mapping[tuple[int, ...], int]) -> Fraction:
    """The least possible maximum when each load may be spread at will over the senders of its key.

    It is the largest, over sets of loads, of their sum by the number of senders that can take any of them. Newton's
    method finds it: the loads that do not fit under a trial value are such a set, and give the next, larger value.
    """
    groups = sorted((holders, nbytes) for holders, nbytes in loads.items() if nbytes)
    if not groups:
        return Fraction(0)
    everyone = {rank for holders, _ in groups for rank in holders}
    peak = Fraction(sum(nbytes for _, nbytes in groups), len(everyone))
    while crowded := _crowded(groups, peak):
        senders = {rank for index in crowded for rank in groups[index][0]}
        peak = Fraction(sum(groups[index][1] for index in crowded), len(senders))
    return peak


def _crowded(groups: list[tuple[tuple[int, ...], int]], peak: Fraction) -> list[int]:
    """Indices of loads on the source side of a minimum cut when each sender takes `peak`; empty when all fit."""
    scale = peak.denominator
    left = [nbytes * scale for _, nbytes in groups]
    room = {rank: peak.numerator for holders, _ in groups for rank in holders}
    placed: list[dict[int, int]] = [{} for _ in groups]  # load -> sender -> amount
    of_sender: dict[int, set[int]] = {rank: set() for rank in room}
    for index, (holders, _) in enumerate(groups):
        for rank in holders:
            _give(index, rank, min(left[index], room[rank]), left, room, placed, of_sender)
    for index in range(len(groups)):
        while left[index]:
            path = _path(index, groups, room, of_sender)
            if path is None:
                return sorted(_reachable(index, groups, of_sender))
            # The path alternates load, sender, load, ...: each load pushes to the next sender what it can take back.
            amount = min(
                [left[index], room[path[-1]]] + [placed[path[at]][path[at - 1]] for at in range(2, len(path), 2)]
            )
            for at in range(0, len(path), 2):
                load, sender = path[at], path[at + 1]
                placed[load][sender] = placed[load].get(sender, 0) + amount
                of_sender[sender].add(load)
                if at:
                    back = path[at - 1]
                    placed[load][back] -= amount
                    if not placed[load][back]:
                        del placed[load][back]
                        of_sender[back].discard(load)
            left[index] -= amount
            room[path[-1]] -= amount
    return []


def _give(
    load: int,
    sender: int,
    amount: int,
    left: list[int],
    room: dict[int, int],
    placed: list[dict[int, int]],
    of_sender: dict[int, set[int]],
) -> None:
    if amount:
        left[load] -= amount
        room[sender] -= amount
        placed[load][sender] = placed[load].get(sender, 0) + amount
        of_sender[sender].add(load)


def _path(
    start: int, groups: list[tuple[tuple[int, ...], int]], room: dict[int, int], of_sender: dict[int, set[int]]
) -> list[int] | None:
    """The shortest chain load, sender, load, ..., sender that ends where there is room; None when there is none."""
    came_from: dict[int, tuple[int, int]] = {}  # sender -> (load before it, sender before that load or -1)
    seen = {start}
    queue = deque([(start, -1)])
    while queue:
        load, before = queue.popleft()
        for sender in groups[load][0]:
            if sender in came_from:
                continue
            came_from[sender] = (load, before)
            if room[sender]:
                return _walk_back(sender, came_from)
            for other in sorted(of_sender[sender] - seen):
                seen.add(other)
                queue.append((other, sender))
    return None


def _walk_back(sender: int, came_from: dict[int, tuple[int, int]]) -> list[int]:
    path: list[int] = []
    at = sender
    while at != -1:
        load, before = came_from[at]
        path[:0] = [load, at]
        at = before
    return path


def _reachable(start: int, groups: list[tuple[tuple[int, ...], int]], of_sender: dict[int, set[int]]) -> set[int]:
    """Loads that compete, directly or through others, for the senders of `start`."""
    seen = {start}
    queue = deque([start])
    while queue:
        for sender in groups[queue.popleft()][0]:
            fresh = of_sender[sender] - seen
            seen |= fresh
            queue.extend(fresh)
    return seen
