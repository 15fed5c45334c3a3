"""A second opinion on plans: every element painted on numpy arrays, with layouts read anew from the rules of torch.

Nothing here uses the package's regions, layouts or tilings: what a rank holds or needs is a mask over the elements of
a tensor, cut out by torch.chunk on lists of indices, and a transfer is two tuples of integers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from equipment.plan_case import Grid, Held, PlanCase, TensorPair
from nemo_rl_reshard.plan.transfer import RankProgram, Transfer

ITEM_SIZE = {"bool": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4, "float64": 8}
_NEVER = np.iinfo(np.int32).max
_ALWAYS = -1
_RULE = re.compile(r"R|S\((\d+)\)|SS\((\d+),(\d+)\)")

Rule = tuple[int, int, int | None]  # size of the axis, coordinate on it, split factor of an interleaved cut


class Arrival(NamedTuple):
    """Elements on their way. What is sent at `time` must have arrived earlier; buckets are counted by `step`."""

    tensor: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    src: int
    dst: int
    link: str
    step: int
    time: int


@dataclass
class Canvas:
    """One tensor: who holds and who needs each element (all of it, of a leftover), when it came to whom, how often."""

    pair: TensorPair
    holds: dict[int, np.ndarray]
    needs: dict[int, np.ndarray]
    since: dict[int, np.ndarray]
    times: dict[int, np.ndarray]

    @classmethod
    def of(cls, case: PlanCase, pair: TensorPair) -> Canvas:
        inside = tuple(slice(0, size) for size in pair.shape)  # padding at the trainers' end is nobody's need
        holds = {rank: mask_of(pair.source, pair.trainers_shape, rank)[inside] for rank in case.ranks}
        needs = {rank: mask_of(pair.target, pair.shape, rank) for rank in case.ranks}
        if pair.name in case.leftovers:
            needs = {rank: np.full(pair.shape, rank in case.targets) for rank in case.ranks}
        since = {rank: np.where(held, _ALWAYS, _NEVER).astype(np.int32) for rank, held in holds.items()}
        times = {rank: np.zeros(pair.shape, dtype=np.int16) for rank in case.ranks}
        return cls(pair, holds, needs, since, times)


def faults_of(case: PlanCase, transfers: Iterable[Transfer]) -> list[str]:
    """Everything wrong with `transfers` of a plan for `case`; empty for a good plan."""
    return _faults_of(
        case,
        [
            Arrival(
                each.tensor, each.region.offset, each.region.extent, each.src, each.dst, str(each.link), each.step,
                each.step,
            )
            for each in transfers
        ],
    )  # fmt: skip


def program_faults_of(case: PlanCase, programs: Sequence[RankProgram]) -> list[str]:
    """The same for what the ranks are told to do: their messages, which start in ascending order."""
    faults: list[str] = []
    told: defaultdict[int, list[int]] = defaultdict(list)
    messages = {}
    for program in programs:
        orders = [message.order for message in program.messages]
        faults += [f"rank {program.rank}: order {after} after {before}" for before, after in pairwise(orders)
                   if after <= before]  # fmt: skip
        for message in program.messages:
            told[message.order].append(program.rank)
            if messages.setdefault(message.order, message) != message:
                faults.append(f"message {message.order} differs between its ranks")
    arrivals = []
    for order, message in messages.items():
        if sorted(told[order]) != sorted({message.src, message.dst}):
            faults.append(f"message {order} is known to {told[order]}, not to {message.src} and {message.dst}")
        nbytes = 0
        for part in message.parts:
            nbytes += int(np.prod(part.region.extent, dtype=np.int64)) * ITEM_SIZE[part.dtype]
            arrivals.append(
                Arrival(
                    part.tensor, part.region.offset, part.region.extent, message.src, message.dst, str(message.link),
                    message.step, order,
                )
            )  # fmt: skip
        if nbytes > min(case.message_bytes, case.bucket_bytes):
            faults.append(f"message {order} has {nbytes} bytes")
    return faults + _faults_of(case, arrivals)


def _faults_of(case: PlanCase, arrivals: Iterable[Arrival]) -> list[str]:
    canvases = {pair.name: Canvas.of(case, pair) for pair in case.tensors}
    faults: list[str] = []
    received: Counter[tuple[int, int]] = Counter()
    entered: Counter[object] = Counter()
    ordered = sorted(arrivals, key=lambda each: (each.time, each))
    turn = {time: index for index, time in enumerate(sorted({each.time for each in ordered}))}
    for arrival in ordered:
        canvas = canvases.get(arrival.tensor)
        if canvas is None:
            faults.append(f"{arrival.tensor} is not to be sent directly")
            continue
        faults += _paint(case, canvas, arrival, turn[arrival.time])
        nbytes = int(np.prod(arrival.extent, dtype=np.int64)) * ITEM_SIZE[canvas.pair.dtype]
        if arrival.src != arrival.dst:
            received[arrival.dst, arrival.step] += nbytes
        if arrival.link == "network":
            entered[case.domain_of(arrival.dst)] += nbytes
    for (rank, step), nbytes in sorted(received.items()):
        if nbytes > case.bucket_bytes:
            faults.append(f"rank {rank} receives {nbytes} bytes in step {step}, a bucket holds {case.bucket_bytes}")
    for name, canvas in canvases.items():
        for rank in case.ranks:
            for word, wrong in (
                ("misses", canvas.needs[rank] & (canvas.times[rank] == 0)),
                ("gets more than once", canvas.times[rank] > 1),
                ("gets without need", ~canvas.needs[rank] & (canvas.times[rank] > 0)),
            ):
                if wrong.any():
                    faults.append(f"{name}: rank {rank} {word} {_places(wrong)}")
    owed = floor_by_domain(case, canvases.values())
    for domain in owed.keys() | entered.keys():
        if owed[domain] != entered[domain]:
            faults.append(f"domain {domain}: {entered[domain]} bytes enter, the floor is {owed[domain]}")
    return faults


def floor_by_domain(case: PlanCase, canvases: Iterable[Canvas] | None = None) -> Counter[object]:
    """Bytes of the union of what each domain needs and no trainer inside it holds."""
    owed: Counter[object] = Counter()
    for canvas in canvases if canvases is not None else [Canvas.of(case, pair) for pair in case.direct]:
        for domain in {case.domain_of(rank) for rank in case.targets}:
            members = [rank for rank in case.ranks if case.domain_of(rank) == domain]
            wanted = np.any([canvas.needs[rank] for rank in members], axis=0)
            here = np.any([canvas.holds[rank] for rank in members], axis=0)
            owed[domain] += int((wanted & ~here).sum()) * ITEM_SIZE[canvas.pair.dtype]
    return owed


def _paint(case: PlanCase, canvas: Canvas, arrival: Arrival, turn: int) -> Iterator[str]:
    """Record one arrival; yields what is wrong with it on its own."""
    text = f"{arrival.tensor} {arrival.offset}+{arrival.extent} from {arrival.src} to {arrival.dst} at {arrival.time}"
    stops = [start + size for start, size in zip(arrival.offset, arrival.extent, strict=True)]
    if len(stops) != len(canvas.pair.shape) or any(a > b for a, b in zip(stops, canvas.pair.shape, strict=False)):
        yield f"{text}: outside shape {canvas.pair.shape}"
        return
    if not {arrival.src, arrival.dst} <= set(case.ranks):
        yield f"{text}: no such rank"
        return
    if arrival.src == arrival.dst:
        link = "local"
    else:
        link = "fast" if case.domain_of(arrival.src) == case.domain_of(arrival.dst) else "network"
    if arrival.link != link:
        yield f"{text}: called {arrival.link}, it is {link}"
    box = tuple(slice(start, stop) for start, stop in zip(arrival.offset, stops, strict=True))
    if not (canvas.since[arrival.src][box] < turn).all():
        yield f"{text}: the sender does not have all of it by then"
    since = canvas.since[arrival.dst]
    since[box] = np.minimum(since[box], turn)
    canvas.times[arrival.dst][box] += 1


def mask_of(held: Held, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Which elements `rank` has, by the rules of torch."""
    mask = np.zeros(shape, dtype=bool)
    if not isinstance(held, Grid):
        for offset, extent in dict(held.by_rank).get(rank, ()):
            mask[tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))] = True
        return mask
    if rank not in held.ranks:
        return mask
    coordinate = np.argwhere(np.asarray(held.ranks).reshape(held.mesh) == rank)[0].tolist()
    rules: list[list[Rule]] = [[] for _ in shape]
    for text, size, at in zip(held.placements.split(), held.mesh, coordinate, strict=True):
        found = _RULE.fullmatch(text)
        assert found, text
        plain, strided, factor = found.groups()
        if size > 1 and text != "R":
            rules[int(plain or strided)].append((size, at, int(factor) if factor else None))
    kept = [_kept(torch.arange(size), cuts).numpy() for size, cuts in zip(shape, rules, strict=True)]
    mask[np.ix_(*kept) if shape else ...] = True
    return mask


def _kept(indices: torch.Tensor, cuts: Sequence[Rule]) -> torch.Tensor:
    """The indices left after `cuts`, left to right, but an interleaved one after those that follow it."""
    if not cuts:
        return indices
    (size, at, factor), *later = cuts
    if factor is None:
        return _kept(_piece(indices, size, at), later)
    if later:
        return _piece(_kept(indices, later), size, at)
    return torch.cat([_piece(indices, size * factor, number) for number in range(at, size * factor, size)])


def _piece(indices: torch.Tensor, parts: int, number: int) -> torch.Tensor:
    pieces = torch.chunk(indices, parts)
    return pieces[number] if number < len(pieces) else indices[:0]


def _places(wrong: np.ndarray) -> str:
    places = [tuple(place) for place in np.argwhere(wrong).tolist()]
    return f"{len(places)} elements, such as {places[0]}"
