"""StepLoads: what every rank sends and receives in every step of a plan, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.plan.plan import Plan
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
    """The loads of all transfers of `plan`, leftovers that are placed included."""
    ranks = tuple(sorted({*plan.sources, *plan.targets}))
    column = {rank: index for index, rank in enumerate(ranks)}
    shape = (plan.num_steps, len(ranks))
    sent = {link: np.zeros(shape, dtype=np.int64) for link in (Link.NETWORK, Link.FAST)}
    received = {link: np.zeros(shape, dtype=np.int64) for link in Link}
    messages_sent, messages_received = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for transfer in plan.transfers():
        nbytes = transfer.region.numel * plan.specs[transfer.tensor].item_size
        src, dst = column[transfer.src], column[transfer.dst]
        received[transfer.link][transfer.step, dst] += nbytes
        if transfer.link is not Link.LOCAL:
            sent[transfer.link][transfer.step, src] += nbytes
            messages_sent[transfer.step, src] += 1
            messages_received[transfer.step, dst] += 1
    return StepLoads(
        ranks,
        sent[Link.NETWORK],
        received[Link.NETWORK],
        sent[Link.FAST],
        received[Link.FAST],
        received[Link.LOCAL],
        messages_sent,
        messages_received,
    )
