"""MessageCounts: how many messages every pair of ranks exchanges in every step of a plan, as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.plan.lower import PER_PAIR, cut_to_messages
from nemo_rl_reshard.plan.plan import Plan, Template
from nemo_rl_reshard.topology import Link

IntArray = NDArray[np.int64]

_AT_ONCE = 1 << 20  # parts that are looked at together, and so bounds the memory this takes: some 100 bytes each


@dataclass(frozen=True)
class MessageCounts:
    """Entry i: in `step[i]` rank `src[i]` sends `count[i]` messages to `dst[i]`, another rank. Shapes [entries]."""

    step: IntArray
    src: IntArray
    dst: IntArray
    count: IntArray


@dataclass(frozen=True)
class _Parts:
    """What `lower` puts into messages, in its order: bytes, and a key that pairs of ranks in steps do not share."""

    key: IntArray
    nbytes: IntArray


def message_counts(plan: Plan) -> Iterator[MessageCounts]:
    """The messages that `lower` makes for all ranks, local copies left out: steps ascend, none is in two yields.

    Takes numpy's time and not a program of every rank. Raises PlanError for more messages than can be numbered.
    """
    ranks = np.array(plan.ranks, dtype=np.int64)
    pairs = len(ranks) ** 2
    limit = plan.options.largest_message
    pending = [_Parts(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    num_pending, most = 0, _AT_ONCE
    for parts, next_step in _parts_of(plan):
        pending.append(parts)
        num_pending += len(parts.key)
        if num_pending < most and next_step is not None:
            continue
        key = np.concatenate([each.key for each in pending])
        nbytes = np.concatenate([each.nbytes for each in pending])
        # What is to come belongs to `next_step` or later: everything before that is complete.
        is_complete = np.ones(len(key), dtype=bool) if next_step is None else key < next_step * pairs
        yield _counted(key[is_complete], nbytes[is_complete], ranks, limit)
        pending = [_Parts(key[~is_complete], nbytes[~is_complete])]
        num_pending = len(pending[0].key)
        most = max(_AT_ONCE, 2 * num_pending)


def _parts_of(plan: Plan) -> Iterator[tuple[_Parts, int | None]]:
    """The parts of every row of `plan.placed`, and the least step of the rows after it; None after the last."""
    size = len(plan.ranks)
    column = {rank: index for index, rank in enumerate(plan.ranks)}
    crews = [np.array([column[rank] for rank in crew], dtype=np.int64) for crew in plan.crews]
    known: dict[tuple[int, int], tuple[IntArray, IntArray, IntArray, IntArray]] = {}
    steps = np.array([row.step for row in plan.placed], dtype=np.int64)
    least: list[int | None] = [*np.minimum.accumulate(steps[::-1])[::-1][1:].tolist(), None]
    for (_, template, variant, crew, step), next_step in zip(plan.placed, least, strict=False):
        found = known.get((template, variant))
        if found is None:
            found = _parts_of_variant(plan.templates[template], variant, plan.options.largest_message)
            known[template, variant] = found
        lag, src, dst, nbytes = found
        member = crews[crew]
        yield _Parts((step + lag) * size**2 + member[src] * size + member[dst], nbytes), next_step


def _parts_of_variant(template: Template, variant: int, limit: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Lag, roles of both ends and bytes of everything that a variant sends, cut as messages are. Shapes [parts]."""
    bytes_of: dict[int, list[int]] = {}
    rows = []
    for piece, src, dst, link, lag in template.variants[variant]:
        if link is Link.LOCAL:
            continue
        if piece not in bytes_of:
            bytes_of[piece] = [nbytes for _, nbytes in cut_to_messages(template, piece, limit)]
        rows += [(lag, src, dst, nbytes) for nbytes in bytes_of[piece]]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    return columns[0], columns[1], columns[2], columns[3]


def _counted(key: IntArray, nbytes: IntArray, ranks: IntArray, limit: int) -> MessageCounts:
    """Parts of one key go into a message as long as it stays within `limit` bytes."""
    order = np.argsort(key, kind="stable")
    key, nbytes = key[order], nbytes[order]
    is_first = np.ones(len(key), dtype=bool)
    is_first[1:] = key[1:] != key[:-1]
    starts = np.flatnonzero(is_first)
    ends = np.append(starts[1:], len(key))
    before = np.concatenate([[0], np.cumsum(nbytes)])
    counts = np.zeros(len(starts), dtype=np.int64)
    at, open_pairs = starts, np.arange(len(starts))
    while len(open_pairs):
        counts[open_pairs] += 1
        # One part is never more than `limit`, so each turn gets on by one at least.
        full = np.searchsorted(before, before[at] + limit, side="right") - 1
        at = np.minimum(full, ends[open_pairs])
        goes_on = at < ends[open_pairs]
        at, open_pairs = at[goes_on], open_pairs[goes_on]
    if len(counts) and counts.max() > PER_PAIR:
        raise PlanError(f"more than {PER_PAIR} messages from one rank to another in a step: raise message_bytes")
    size = len(ranks)
    step, pair = np.divmod(key[starts], size**2)
    src, dst = np.divmod(pair, size)
    return MessageCounts(step, ranks[src], ranks[dst], counts)
