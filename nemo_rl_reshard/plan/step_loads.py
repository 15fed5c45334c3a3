"""StepLoads: what every rank sends and receives in every step of a plan, as arrays."""

from __future__ import annotations

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


def step_loads(plan: Plan) -> StepLoads:
    """The loads of all transfers of `plan`."""
    ranks = plan.ranks
    column = {rank: index for index, rank in enumerate(ranks)}
    total = np.zeros((len(_FIELDS), plan.num_steps, len(ranks)), dtype=np.int64)
    columns_of = [np.array([column[rank] for rank in crew], dtype=np.int64) for crew in plan.crews]
    by_role: dict[tuple[int, int], list[tuple[int, IntArray, IntArray]]] = {}
    for _, template, variant, crew, step in plan.placed:
        found = by_role.get((template, variant))
        if found is None:
            found = by_role[template, variant] = _by_lag(plan.templates[template], variant)
        for lag, roles, loads in found:
            total[:, step + lag, columns_of[crew][roles]] += loads
    return StepLoads(ranks, *total)


_FIELDS = tuple(field.name for field in fields(StepLoads))[1:]
_NETWORK_SENT, _NETWORK_RECEIVED, _FAST_SENT, _FAST_RECEIVED, _LOCAL, _SENT, _RECEIVED = range(len(_FIELDS))


def _by_lag(template: Template, variant: int) -> list[tuple[int, IntArray, IntArray]]:
    """For every lag of a variant the roles that do anything, and their loads: [field, role]."""
    found: dict[int, dict[int, list[int]]] = {}
    for piece, src, dst, link, lag in template.variants[variant]:
        nbytes = template.nbytes_of(piece)
        loads = found.setdefault(lag, {})
        received = loads.setdefault(dst, [0] * len(_FIELDS))
        if link is Link.LOCAL:
            received[_LOCAL] += nbytes
            continue
        sent = loads.setdefault(src, [0] * len(_FIELDS))
        sent[_NETWORK_SENT if link is Link.NETWORK else _FAST_SENT] += nbytes
        sent[_SENT] += 1
        received[_NETWORK_RECEIVED if link is Link.NETWORK else _FAST_RECEIVED] += nbytes
        received[_RECEIVED] += 1
    return [
        (lag, np.array(list(loads), dtype=np.int64), np.array(list(loads.values()), dtype=np.int64).T)
        for lag, loads in found.items()
    ]
