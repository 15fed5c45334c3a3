"""Lowering: one rank's part of a plan as bounded messages in an order that all ranks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import bounded
from nemo_rl_reshard.plan.plan import Move, Plan, Template
from nemo_rl_reshard.plan.transfer import Message, Part, RankProgram
from nemo_rl_reshard.topology import Link

PER_PAIR = 1 << 20
"""Messages that one pair may exchange in one step; fixed, so that every rank numbers alike."""

Number = TypeVar("Number", int, NDArray[np.int64])


def lower(plan: Plan, rank: int) -> RankProgram:
    """The program of `rank`: its messages in ascending `order`, of at most `message_bytes` each.

    Parts of one (step, source, receiver) share messages in the plan's order; a region too big for one is cut in rows.
    Order goes by step, then turn by turn over all pairs, so that inside a step every pair is busy at once. Both ends
    of a message compute the same number. A forward's order is above its receive's, being of a later step.
    Raises PlanError for a rank that the plan does not know.
    """
    if rank not in plan.sources and rank not in plan.targets:
        raise PlanError(f"rank {rank} is in neither side of this plan")
    limit = plan.options.largest_message
    world = numbered_ranks(plan)
    links: dict[tuple[int, int, int], Link] = {}
    parts: defaultdict[tuple[int, int, int], list[Part]] = defaultdict(list)
    for tensor, step, (lag, src, dst, link, cuts), dtype in _moves_of(plan, rank):
        key = (step + lag, src, dst)
        links[key] = link
        parts[key].extend([Part(tensor, region, dtype, nbytes) for region, nbytes in cuts])
    messages = []
    for (step, src, dst), found in parts.items():
        for turn, batch in enumerate(_batches(found, limit)):
            if turn >= PER_PAIR:
                raise PlanError(
                    f"more than {PER_PAIR} messages from {src} to {dst} in step {step}: raise message_bytes"
                )
            order = order_of(step, turn, src, dst, world)
            messages.append(Message(order, step, src, dst, links[step, src, dst], tuple(batch)))
    messages.sort(key=lambda message: message.order)
    placed = {row.tensor for row in plan.placed}
    return RankProgram(
        rank=rank,
        digest=plan.digest,
        messages=tuple(messages),
        leftovers=tuple(plan.specs[leftover.tensor] for leftover in plan.leftovers if leftover.tensor in placed),
        message_bytes=limit,
    )


def order_of(step: Number, turn: Number, src: Number, dst: Number, world: int) -> Number:
    """The place in the order that all ranks share of the `turn`-th message of a pair in `step`. Integers or arrays."""
    return ((step * PER_PAIR + turn) * world + (dst - src) % world) * world + src


def numbered_ranks(plan: Plan) -> int:
    """The `world` of `order_of`: ranks below it are numbered, whether they take part or not."""
    return max(*plan.sources, *plan.targets) + 1


def cut_to_messages(template: Template, piece: int, limit: int) -> Cuts:
    """The regions of one piece and their bytes, each small enough for a message of `limit` bytes."""
    cuts = bounded(template.pieces[piece], limit // template.item_size)
    return [(part, part.numel * template.item_size) for part in cuts]


Cuts = list[tuple[Region, int]]  # regions and their bytes, each small enough for a message
_Mine = tuple[int, int, int, Link, Cuts]  # lag, ranks of both ends, link, region cut to messages


def _moves_of(plan: Plan, rank: int) -> Iterator[tuple[str, int, _Mine, str]]:
    """(tensor, its step, move, dtype) of all moves of one rank, in the order of `plan.placed`."""
    limit = plan.options.largest_message
    roles = [crew.index(rank) if rank in crew else None for crew in plan.crews]
    by_role: dict[tuple[int, int], dict[int, list[Move]]] = {}
    cut_pieces: dict[tuple[int, int], Cuts] = {}
    mine: dict[tuple[int, int, int], list[_Mine]] = {}
    for tensor, index, variant, place, step in plan.placed:
        role = roles[place]
        if role is None:
            continue
        moves = mine.get((index, variant, place))
        if moves is None:
            template, crew = plan.templates[index], plan.crews[place]
            if (index, variant) not in by_role:
                by_role[index, variant] = _by_role(template.variants[variant])
            moves = mine[index, variant, place] = []
            for piece, src, dst, link, lag in by_role[index, variant].get(role, ()):
                if (index, piece) not in cut_pieces:
                    cut_pieces[index, piece] = cut_to_messages(template, piece, limit)
                moves.append((lag, crew[src], crew[dst], link, cut_pieces[index, piece]))
        dtype = plan.specs[tensor].dtype
        for move in moves:
            yield tensor, step, move, dtype


def _by_role(moves: Iterable[Move]) -> dict[int, list[Move]]:
    """Role -> the moves that it takes part in."""
    found: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        for role in {move.src, move.dst}:
            found[role].append(move)
    return found


def _batches(parts: list[Part], limit: int) -> Iterator[list[Part]]:
    """Consecutive parts together as long as they stay within `limit` bytes."""
    batch: list[Part] = []
    filled = 0
    for part in parts:
        if batch and filled + part.nbytes > limit:
            yield batch
            batch, filled = [], 0
        batch.append(part)
        filled += part.nbytes
    if batch:
        yield batch
