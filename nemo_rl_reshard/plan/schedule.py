"""Schedule: steps for tensors, so that no rank receives more than a bucket in a step and none waits for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.plan.plan import Crew, Move, Template
from nemo_rl_reshard.topology import Link

_IntArray = NDArray[np.int64]


class Flow:
    """What placing needs to know of one variant played by one crew: bytes that ranks receive, by lag.

    `columns` are the ranks that receive anything, as places in the schedule's order of ranks. `by_lag` holds their
    bytes at every lag and `total` over all lags. `lags` replaces the variant's lags when it does not fit a step.
    """

    __slots__ = ("by_lag", "columns", "lags", "total")

    def __init__(self, columns: _IntArray, by_lag: tuple[_IntArray, ...], lags: tuple[int, ...] | None) -> None:
        self.columns = columns
        self.by_lag = by_lag
        self.total: _IntArray = np.sum(by_lag, axis=0) if by_lag else np.zeros(0, dtype=np.int64)
        self.lags = lags


class Schedule:
    """Places tensors one after the other, each in the first step in which all its receivers have room.

    A rank fills its steps in the order in which tensors are placed; a busy one does not hold up the others. Local
    copies cost no bucket.
    """

    def __init__(self, ranks: Iterable[int], bucket_bytes: int) -> None:
        self._column: Mapping[int, int] = {rank: index for index, rank in enumerate(sorted(set(ranks)))}
        self._bucket = bucket_bytes
        self._nearly_full = bucket_bytes - bucket_bytes // 16
        self._received: list[_IntArray] = []  # step -> rank -> bytes
        self._started: list[_IntArray] = []  # step -> rank -> bytes, now or later, of the tensors placed there
        self._open = np.zeros(len(self._column), dtype=np.int64)  # rank -> first step that may have room

    def flow(self, template: Template, moves: Sequence[Move], crew: Crew) -> Flow:
        """Prepare a variant; one flow serves all tensors that use it with crews that receive alike."""
        per_lag: defaultdict[int, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
        for move in moves:
            if move.link is not Link.LOCAL:
                per_lag[move.lag][self._column[crew[move.dst]]] += template.nbytes_of(move.piece)
        columns = sorted({column for received in per_lag.values() for column in received})
        by_lag = tuple(
            np.array([per_lag[lag][column] for column in columns], dtype=np.int64)
            for lag in range(max(per_lag, default=-1) + 1)
        )
        flow = Flow(np.array(columns, dtype=np.int64), by_lag, None)
        if (flow.total > self._bucket).any():
            sizes = [template.nbytes_of(piece) for piece in range(len(template.pieces))]
            flow.lags = _lags(sizes, moves, self._bucket)
        return flow

    def place(self, flow: Flow) -> int:
        """The step in which this tensor starts; its moves follow at their lags."""
        if flow.lags is not None:
            # Larger than a bucket: it gets steps of its own, after everything so far.
            start = len(self._received)
            self._reach(start + max(flow.lags))
            self._open[:] = start + max(flow.lags) + 1
            return start
        if not flow.columns.size:
            return 0
        columns = flow.columns
        step = int(self._open[columns].max())
        while True:
            self._reach(step + len(flow.by_lag) - 1)
            # What a step starts leaves room for its own forwards, so that in the long run both kinds flow side by side.
            full = self._started[step][columns] + flow.total > self._bucket
            for lag, nbytes in enumerate(flow.by_lag):
                full |= self._received[step + lag][columns] + nbytes > self._bucket
            if not full.any():
                break
            # A step with some room left is kept open for smaller tensors.
            used = np.maximum(self._started[step][columns], self._received[step][columns])
            self._open[columns[used > self._nearly_full]] = step + 1
            step += 1
        self._started[step][columns] += flow.total
        for lag, nbytes in enumerate(flow.by_lag):
            self._received[step + lag][columns] += nbytes
        return step

    def _reach(self, step: int) -> None:
        while len(self._received) <= step:
            self._received.append(np.zeros(len(self._column), dtype=np.int64))
            self._started.append(np.zeros(len(self._column), dtype=np.int64))


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
        lag = arrived[move.src, move.piece] + 1 if move.lag else earliest[move.dst]
        while used[move.dst, lag] + nbytes > bucket:
            lag += 1
        if not move.lag:
            earliest[move.dst] = lag
        used[move.dst, lag] += nbytes
        arrived[move.dst, move.piece] = lag
        lags.append(lag)
    return tuple(lags)
