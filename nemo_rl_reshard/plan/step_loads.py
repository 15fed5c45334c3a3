"""StepLoads: what every rank sends and receives in every step of a plan, as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.plan.plan import Plan, Template
from nemo_rl_reshard.topology import Link

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class StepLoads:
    """Bytes and messages by step and rank. Every array has shape [num_steps, len(ranks)]; `ranks` ascend.

    A message is a tensor's region here; lowering may join those of one pair of ranks. Local copies count as
    `local_bytes` and as no message.
    """

    ranks: tuple[int, ...]
    network_sent: IntArray
    network_received: IntArray
    fast_sent: IntArray
    fast_received: IntArray
    local_bytes: IntArray
    messages_sent: IntArray
    messages_received: IntArray


_FIELDS = tuple(field.name for field in fields(StepLoads))[1:]
_NETWORK_SENT, _NETWORK_RECEIVED, _FAST_SENT, _FAST_RECEIVED, _LOCAL, _SENT, _RECEIVED = range(len(_FIELDS))


def step_loads(plan: Plan) -> StepLoads:
    """The loads of all transfers of `plan`."""
    return StepLoads(plan.ranks, *_added_up(plan, lambda loads: loads))


def inbound(plan: Plan) -> IntArray:
    """Bytes that ranks receive from others: [num_steps, number of ranks], columns as in `step_loads`."""
    both = [_NETWORK_RECEIVED, _FAST_RECEIVED]
    received: IntArray = _added_up(plan, lambda loads: loads[both].sum(axis=0, keepdims=True))[0]
    return received


def _added_up(plan: Plan, wanted: Callable[[IntArray], IntArray]) -> IntArray:
    """What `wanted` takes of the loads of a variant, [field, entry], over the whole plan: [field, step, rank]."""
    column = {rank: index for index, rank in enumerate(plan.ranks)}
    columns_of = [np.array([column[rank] for rank in crew], dtype=np.int64) for crew in plan.crews]
    known: dict[tuple[int, int], tuple[IntArray, IntArray, IntArray]] = {}
    total: IntArray | None = None
    for _, template, variant, crew, step in plan.placed:
        found = known.get((template, variant))
        if found is None:
            lags, roles, loads = _by_lag(plan.templates[template], variant)
            chosen = wanted(loads)
            used = chosen.any(axis=0)
            found = known[template, variant] = (lags[used], roles[used], chosen[:, used])
        lags, roles, loads = found
        if total is None:
            total = np.zeros((len(loads), plan.num_steps, len(plan.ranks)), dtype=np.int64)
        total[:, step + lags, columns_of[crew][roles]] += loads
    if total is None:
        total = np.zeros((len(wanted(np.zeros((len(_FIELDS), 0), dtype=np.int64))), 0, len(plan.ranks)), dtype=np.int64)
    return total


def _by_lag(template: Template, variant: int) -> tuple[IntArray, IntArray, IntArray]:
    """Lag and role of every entry of a variant, each pair once, and their loads: [field, entry]."""
    found: dict[tuple[int, int], list[int]] = {}
    for piece, src, dst, link, lag in template.variants[variant]:
        nbytes = template.nbytes_of(piece)
        received = found.setdefault((lag, dst), [0] * len(_FIELDS))
        if link is Link.LOCAL:
            received[_LOCAL] += nbytes
            continue
        sent = found.setdefault((lag, src), [0] * len(_FIELDS))
        sent[_NETWORK_SENT if link is Link.NETWORK else _FAST_SENT] += nbytes
        sent[_SENT] += 1
        received[_NETWORK_RECEIVED if link is Link.NETWORK else _FAST_RECEIVED] += nbytes
        received[_RECEIVED] += 1
    places = np.array(list(found), dtype=np.int64).reshape(-1, 2)
    return places[:, 0], places[:, 1], np.array(list(found.values()), dtype=np.int64).reshape(-1, len(_FIELDS)).T
