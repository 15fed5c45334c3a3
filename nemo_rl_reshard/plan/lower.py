"""Lowering: one rank's part of a plan as bounded messages in an order that all ranks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import bounded
from nemo_rl_reshard.plan.plan import Move, Plan
from nemo_rl_reshard.plan.transfer import Message, Part, RankProgram
from nemo_rl_reshard.topology import Link

_PER_PAIR = 1 << 20  # messages that one pair may exchange in one step; fixed, so that every rank numbers alike


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
    world = max(*plan.sources, *plan.targets) + 1
    links: dict[tuple[int, int, int], Link] = {}
    parts: defaultdict[tuple[int, int, int], list[Part]] = defaultdict(list)
    for tensor, step, (lag, src, dst, link, cuts), dtype in _moves_of(plan, rank):
        key = (step + lag, src, dst)
        links[key] = link
        parts[key].extend([Part(tensor, region, dtype, nbytes) for region, nbytes in cuts])
    messages = []
    for (step, src, dst), found in parts.items():
        for turn, batch in enumerate(_batches(found, limit)):
            if turn >= _PER_PAIR:
                raise PlanError(
                    f"more than {_PER_PAIR} messages from {src} to {dst} in step {step}: raise message_bytes"
                )
            order = ((step * _PER_PAIR + turn) * world + (dst - src) % world) * world + src
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


_Cuts = list[tuple[Region, int]]  # regions and their bytes, each small enough for a message
_Mine = tuple[int, int, int, Link, _Cuts]  # lag, ranks of both ends, link, region cut to messages


def _moves_of(plan: Plan, rank: int) -> Iterator[tuple[str, int, _Mine, str]]:
    """(tensor, its step, move, dtype) of all moves of one rank, in the order of `plan.placed`."""
    limit = plan.options.largest_message
    roles = [crew.index(rank) if rank in crew else None for crew in plan.crews]
    by_role: dict[tuple[int, int], dict[int, list[Move]]] = {}
    cut_pieces: dict[tuple[int, int], _Cuts] = {}
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
                    cuts = bounded(template.pieces[piece], limit // template.item_size)
                    cut_pieces[index, piece] = [(part, part.numel * template.item_size) for part in cuts]
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
