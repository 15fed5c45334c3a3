"""Running plans without a transport: on numpy arrays, and as an event game of bounded windows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from equipment.declaring import Refit
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.transfer import Message, RankProgram

UNWRITTEN = -1


def position_codes(shape: Sequence[int], tensor: int, version: int) -> np.ndarray:
    """Values that name tensor, element and version, so that no two places look alike."""
    count = int(np.prod(shape, dtype=np.int64))
    return (np.arange(count, dtype=np.int64) + 1000 * tensor + 1_000_000 * version).reshape(tuple(shape))


def wholes_of(refit: Refit, version: int) -> dict[str, np.ndarray]:
    """The whole of every direct tensor at one version, as a gather would give it."""
    return {
        row.tensor: position_codes(refit.target.specs[row.tensor].shape, index, version)
        for index, row in enumerate(refit.plan.placed)
    }


def deliver(refit: Refit, wholes: Mapping[str, np.ndarray]) -> dict[tuple[str, int], np.ndarray]:
    """Run the programs of all ranks and return (tensor, rank) -> array with UNWRITTEN where nothing came.

    A message may only carry what its sender held, or received in an earlier step; an element may come once.
    """
    held: dict[tuple[str, int], np.ndarray] = {}
    for name, whole in wholes.items():
        for rank, regions in refit.source.layouts[name].held:
            array = held[name, rank] = np.full_like(whole, UNWRITTEN)
            for region in regions:
                inside = tuple(
                    slice(a, min(b, size)) for a, b, size in zip(region.offset, region.stop, whole.shape, strict=True)
                )
                array[inside] = whole[inside]
    got = {
        (name, rank): np.full_like(whole, UNWRITTEN) for name, whole in wholes.items() for rank in refit.target.ranks
    }
    by_step: defaultdict[int, dict[int, Message]] = defaultdict(dict)
    for rank in refit.ranks:
        for message in lower(refit.plan, rank).messages:
            by_step[message.step][message.order] = message
    for step in sorted(by_step):
        written: list[tuple[tuple[str, int], tuple[slice, ...], np.ndarray]] = []
        for message in by_step[step].values():
            for part in message.parts:
                index = part.region.slices
                value = held[part.tensor, message.src][index] if (part.tensor, message.src) in held else None
                if value is None or (value == UNWRITTEN).any():
                    value = got[part.tensor, message.src][index]
                assert not (value == UNWRITTEN).any(), f"rank {message.src} sends what it does not have: {part}"
                written.append(((part.tensor, message.dst), index, value.copy()))
        for place, index, value in written:
            assert (got[place][index] == UNWRITTEN).all(), f"{place} is written twice"
            got[place][index] = value
    return got


def assert_delivered(refit: Refit, version: int = 1) -> None:
    """Gather-then-slice oracle: every needed element is there, and nothing else was written."""
    wholes = wholes_of(refit, version)
    got = deliver(refit, wholes)
    for (name, rank), array in got.items():
        expected = np.full_like(array, UNWRITTEN)
        for region in refit.target.layouts[name].regions_of(rank):
            expected[region.slices] = wholes[name][region.slices]
        np.testing.assert_array_equal(array, expected, err_msg=f"{name} on rank {rank}")


def finishes(programs: Sequence[RankProgram], window: int) -> bool:
    """Play the programs with at most `window` started and unfinished messages per rank.

    A rank starts its messages in order; a sender needs earlier-step arrivals of what it forwards to be complete, so it
    waits for all its receives of earlier steps. A message ends once both ends started it. False means deadlock.
    """
    started: dict[int, int] = {program.rank: 0 for program in programs}
    open_messages: dict[int, set[int]] = {program.rank: set() for program in programs}
    begun: defaultdict[int, set[int]] = defaultdict(set)
    ended: set[int] = set()
    queues = {program.rank: program.messages for program in programs}
    moved = True
    while moved:
        moved = False
        for rank, queue in queues.items():
            while started[rank] < len(queue) and len(open_messages[rank]) < window:
                message = queue[started[rank]]
                if message.src == rank and any(
                    earlier.dst == rank and earlier.step < message.step and earlier.order not in ended
                    for earlier in queue[: started[rank]]
                ):
                    break
                begun[message.order].add(rank)
                open_messages[rank].add(message.order)
                started[rank] += 1
                moved = True
        for rank, queue in queues.items():
            for message in queue:
                if message.order in open_messages[rank] and begun[message.order] == {message.src, message.dst}:
                    ended.add(message.order)
                    open_messages[message.src].discard(message.order)
                    open_messages[message.dst].discard(message.order)
                    moved = True
    return all(started[rank] == len(queue) for rank, queue in queues.items()) and not any(open_messages.values())
