"""Schedule: steps for tensors, so that no rank receives more than a bucket in a step and none waits for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.plan.plan import Crew, Move, Template
from nemo_rl_reshard.topology import Link

_IntArray = NDArray[np.int64]

_SEND_BUCKETS = 2
"""Of a bucket, per step: receivers set the pace, and senders that come in bursts must be able to."""
_STEADY = 0.85
"""Of a bucket: what the tensors that start in one step may bring to a rank in all. Filled to the brim, a step that one
tensor overfills would stop all that pass through it, and starts would come in bursts from then on."""


class Variant:
    """The moves of one variant as arrays: bytes that roles receive, and send over the network, by lag.

    Parallel arrays: at `lag` role `role` takes `nbytes`, as a sender if `sends`. `lags` replaces the variant's own lags
    when what one role receives does not fit a bucket.
    """

    __slots__ = ("lag", "lags", "last", "nbytes", "received", "receivers", "role", "sends")

    def __init__(self, template: Template, moves: Sequence[Move], bucket: int) -> None:
        sizes = [template.nbytes_of(piece) for piece in range(len(template.pieces))]
        loads: defaultdict[tuple[int, bool, int], int] = defaultdict(int)
        received: defaultdict[int, int] = defaultdict(int)
        for piece, src, dst, link, lag in moves:
            if link is Link.LOCAL:
                continue
            received[dst] += sizes[piece]
            loads[lag, False, dst] += sizes[piece]
            if link is Link.NETWORK:
                loads[lag, True, src] += sizes[piece]
        keys = sorted(loads)
        self.lag = np.array([lag for lag, _, _ in keys], dtype=np.int64)
        self.sends = np.array([sends for _, sends, _ in keys], dtype=bool)
        self.role = np.array([role for _, _, role in keys], dtype=np.int64)
        self.nbytes = np.array([loads[key] for key in keys], dtype=np.int64)
        self.receivers = np.array(sorted(received), dtype=np.int64)
        self.received = np.array([received[role] for role in sorted(received)], dtype=np.int64)
        self.last = max((lag for lag, _, _ in keys), default=0)
        self.lags = _lags(sizes, moves, bucket) if max(received.values(), default=0) > bucket else None


class Flow:
    """A variant played by one crew. `column` says where the schedule counts each of the variant's loads."""

    __slots__ = ("column", "limit", "receivers", "variant")

    def __init__(self, variant: Variant, columns: _IntArray, num_ranks: int, bucket: int) -> None:
        self.variant = variant
        self.column = columns[variant.role] + num_ranks * variant.sends
        self.receivers = columns[variant.receivers]
        # Or the load alone where that is more: it then gets a step to itself.
        self.limit = np.maximum(variant.nbytes, np.where(variant.sends, _SEND_BUCKETS * bucket, bucket))


class Schedule:
    """Places tensors one after the other, each in the first step in which all its ranks have room.

    No rank receives more than a bucket in a step, or sends more than two over the network, but for a tensor of which it
    must send more at once. A rank fills its steps in the order in which tensors are placed; a busy one does not hold up
    the others. Local copies cost no bucket.
    """

    def __init__(self, ranks: Iterable[int], bucket_bytes: int) -> None:
        self._place: Mapping[int, int] = {rank: index for index, rank in enumerate(sorted(set(ranks)))}
        self._bucket = bucket_bytes
        self._steady = int(bucket_bytes * _STEADY)
        self._nearly_full = self._steady - bucket_bytes // 16
        # By step; columns are the ranks as receivers, then the ranks as senders.
        self._used = np.zeros((64, 2 * len(self._place)), dtype=np.int64)
        self._started = np.zeros((64, len(self._place)), dtype=np.int64)  # bytes, now or later, of tensors placed there
        self._num_steps = 0
        self._open = np.zeros(len(self._place), dtype=np.int64)  # receiver -> first step that may have room

    def flow(self, variant: Variant, crew: Crew) -> Flow:
        """Prepare a variant for the tensors of one crew."""
        columns = np.array([self._place[rank] for rank in crew], dtype=np.int64)
        return Flow(variant, columns, len(self._place), self._bucket)

    def place(self, flow: Flow) -> int:
        """The step in which this tensor starts; its moves follow at their lags."""
        variant = flow.variant
        if variant.lags is not None:
            # Larger than a bucket: it gets steps of its own, after everything so far.
            start = self._num_steps
            self._reach(start + max(variant.lags))
            self._open[:] = self._num_steps
            return start
        receivers = flow.receivers
        if not receivers.size:
            return 0
        step = int(self._open[receivers].max())
        while True:
            self._reach(step + variant.last)
            # What a step starts leaves room for its own forwards, so that in the long run both kinds flow side by side.
            started = self._started[step, receivers] + variant.received
            if (started <= np.maximum(self._steady, variant.received)).all():
                used = self._used[step + variant.lag, flow.column] + variant.nbytes
                if (used <= flow.limit).all():
                    break
            # A step with some room left is kept open for smaller tensors.
            full = np.maximum(self._started[step, receivers], self._used[step, receivers]) > self._nearly_full
            self._open[receivers[full]] = step + 1
            step += 1
        self._started[step, receivers] = started
        self._used[step + variant.lag, flow.column] = used
        return step

    def _reach(self, step: int) -> None:
        while step >= len(self._used):
            self._used = np.concatenate((self._used, np.zeros_like(self._used)))
            self._started = np.concatenate((self._started, np.zeros_like(self._started)))
        self._num_steps = max(self._num_steps, step + 1)


def _lags(sizes: Sequence[int], moves: Sequence[Move], bucket: int) -> tuple[int, ...]:
    """Lags that keep every step of a large tensor within a bucket: each move as early as its rank has room.

    `moves` come by their old lags, so a piece arrives before it is passed on. A single piece is never larger than a
    bucket. A forward comes at least one step after its piece arrived.
    """
    used: defaultdict[tuple[int, int], int] = defaultdict(int)  # (role, step) -> bytes
    earliest: defaultdict[int, int] = defaultdict(int)
    arrived: dict[tuple[int, int], int] = {}
    lags = []
    for move in moves:
        if move.link is Link.LOCAL:
            lags.append(0)
            continue
        nbytes = sizes[move.piece]
        came = arrived.get((move.src, move.piece))
        lag = earliest[move.dst] if came is None else came + 1
        while used[move.dst, lag] + nbytes > bucket:
            lag += 1
        if came is None:
            earliest[move.dst] = lag
        used[move.dst, lag] += nbytes
        arrived[move.dst, move.piece] = lag
        lags.append(lag)
    return tuple(lags)
