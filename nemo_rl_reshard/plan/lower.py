"""Lowering: one rank's part of a plan as bounded messages in an order that all ranks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import bounded
from nemo_rl_reshard.plan.plan import Move, Plan
from nemo_rl_reshard.plan.transfer import Message, Part, RankProgram
from nemo_rl_reshard.topology import Link

_PER_PAIR = 1 << 20  # messages that one pair may exchange in one step; fixed, so that every rank numbers alike


def lower(plan: Plan, rank: int) -> RankProgram:
    """The program of `rank`: its messages in ascending `order`, of at most `message_bytes` each.

    Parts of one (step, source, receiver) share messages in model order; a region too big for one is cut along rows.
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
    for tensor, step, move, cuts, dtype in _moves_of(plan, rank):
        key = (step + move.lag, move.src, move.dst)
        links[key] = move.link
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
    return RankProgram(
        rank=rank,
        digest=plan.digest,
        messages=tuple(messages),
        leftovers=tuple(leftover.tensor for leftover in plan.leftovers),
        message_bytes=limit,
    )


_Cuts = list[tuple[Region, int]]  # regions and their bytes, each small enough for a message


def _moves_of(plan: Plan, rank: int) -> Iterator[tuple[str, int, Move, _Cuts, str]]:
    """(tensor, its step, move, the move's region cut to messages, dtype) of all moves of one rank, model order."""
    limit = plan.options.largest_message
    mine: dict[tuple[int, int], list[tuple[Move, _Cuts]]] = {}
    for tensor, index, variant, step in plan.placed:
        moves = mine.get((index, variant))
        if moves is None:
            template = plan.templates[index]
            size = template.item_size
            moves = mine[index, variant] = [
                (move, [(part, part.numel * size) for part in bounded(template.pieces[move.piece], limit // size)])
                for move in template.variants[variant]
                if rank in (move.src, move.dst)
            ]
        dtype = plan.specs[tensor].dtype
        for move, cuts in moves:
            yield tensor, step, move, cuts, dtype


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
