"""Schedule: steps for tensors in model order, so that no rank receives more than a bucket in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from nemo_rl_reshard.plan.plan import Move
from nemo_rl_reshard.topology import Link

Flow = tuple[Sequence[int], Sequence[Move]]  # bytes per piece, moves


class Schedule:
    """Places tensors one after the other. Steps never go back, so every rank finishes tensors in model order, except
    that one it gets by a forward may end one step after tensors that follow it.

    Pass a variant's flow to `prepare` once, then `place` each tensor that uses it. Local copies cost no bucket.
    """

    def __init__(self, ranks: Iterable[int], bucket_bytes: int) -> None:
        self._column = {rank: index for index, rank in enumerate(sorted(set(ranks)))}
        self._bucket = bucket_bytes
        self._step = 0
        self._pending = self._zeros()  # forwards of the previous step, received in this one
        self._arriving = self._zeros()  # first hops of this step
        self._forwards = self._zeros()  # what this step's tensors forward in the next one

    def prepare(self, flow: Flow) -> PreparedFlow:
        """What placing needs to know of one variant: inbound bytes per rank of first hops and of forwards."""
        sizes, moves = flow
        first, second = self._zeros(), self._zeros()
        for move in moves:
            if move.link is not Link.LOCAL:
                (second if move.lag else first)[self._column[move.dst]] += sizes[move.piece]
        large = bool((first + second > self._bucket).any())
        return PreparedFlow(first, second, _lags(sizes, moves, self._bucket) if large else None)

    def place(self, flow: PreparedFlow) -> int:
        """The step in which this tensor starts; its moves follow at their lags."""
        if flow.lags is not None:
            # Larger than a bucket: it gets steps of its own.
            self._advance_to_empty()
            start = self._step
            self._step += max(flow.lags) + 1
            return start
        while not self._fits(flow):
            self._advance()
        self._arriving += flow.first
        self._forwards += flow.second
        return self._step

    def _fits(self, flow: PreparedFlow) -> bool:
        arriving = self._arriving + flow.first
        # A step's first hops leave room for its own forwards, so that in the long run both kinds flow side by side.
        return not (
            (arriving + self._pending > self._bucket).any()
            or (arriving + self._forwards + flow.second > self._bucket).any()
        )

    def _advance(self) -> None:
        self._step += 1
        self._pending = self._forwards
        self._arriving, self._forwards = self._zeros(), self._zeros()

    def _advance_to_empty(self) -> None:
        while self._pending.any() or self._arriving.any() or self._forwards.any():
            self._advance()

    def _zeros(self) -> np.ndarray:
        return np.zeros(len(self._column), dtype=np.int64)


class PreparedFlow:
    """Inbound bytes per rank of one variant; `lags` replaces its lags when it does not fit a step of its own."""

    __slots__ = ("first", "lags", "second")

    def __init__(self, first: np.ndarray, second: np.ndarray, lags: tuple[int, ...] | None) -> None:
        self.first = first
        self.second = second
        self.lags = lags


def _lags(sizes: Sequence[int], moves: Sequence[Move], bucket: int) -> tuple[int, ...]:
    """Lags that keep every step of a large tensor within a bucket: each move as early as its rank has room.

    A single piece is never larger than a bucket. A forward comes at least one step after its piece arrived.
    """
    used: defaultdict[tuple[int, int], int] = defaultdict(int)  # (rank, step) -> bytes
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
