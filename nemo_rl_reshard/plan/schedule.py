"""Schedule: steps for tensors, so that no rank receives more than a bucket in a step and none waits for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.plan.plan import Crew, Move, Template, columns_of
from nemo_rl_reshard.topology import Link

_IntArray = NDArray[np.int64]

_SEND_BUCKETS = 2
"""Of a bucket, per step: receivers set the pace, and senders that come in bursts must be able to."""
_STEADY = 0.85
"""Of a bucket: what the tensors that start in one step may bring to a rank in all. Filled to the brim, a step that one
tensor overfills would stop all that pass through it, and starts would come in bursts from then on."""


class Variant:
    """The moves of one variant as arrays: bytes that roles receive, and send over the network, by lag.

    Parallel arrays: at `lag` role `role` takes `nbytes`, as a sender if `sends`. `wave`, `receiver` and `started` are
    parallel too: what a role receives of the pieces that trainers send at that lag. `lags` replaces the variant's own
    lags when what one role receives at one of them does not fit a bucket.
    """

    __slots__ = ("lag", "lags", "last", "nbytes", "receiver", "role", "sends", "started", "wave")

    def __init__(self, template: Template, moves: Sequence[Move], bucket: int) -> None:
        sizes = _array(template.nbytes_of(piece) for piece in range(len(template.pieces)))
        far = [move for move in moves if move.link is not Link.LOCAL]
        piece, src, dst, lag = columns_of(far)
        network = np.array([move.link is Link.NETWORK for move in far], dtype=bool)
        nbytes = sizes[piece]
        places, self.nbytes = _added_up(
            np.concatenate((lag, lag[network])),
            np.concatenate((np.zeros_like(lag), np.ones_like(lag[network]))),
            np.concatenate((dst, src[network])),
            nbytes=np.concatenate((nbytes, nbytes[network])),
        )
        self.lag, self.role = places[0], places[2]
        self.sends = places[1].astype(bool)
        first = np.full(len(sizes), np.iinfo(np.int64).max)  # piece -> lag at which trainers send it
        np.minimum.at(first, piece, lag)
        (self.wave, self.receiver), self.started = _added_up(first[piece], dst, nbytes=nbytes)
        self.last = int(lag.max(initial=0))
        most = int(self.nbytes[~self.sends].max(initial=0))
        self.lags = _lags(sizes.tolist(), moves, bucket) if most > bucket else None


class Flow:
    """A variant played by one crew. `column` says where the schedule counts each of the variant's loads.

    Flows that receive alike share `since`, the first step that may have room for them: loads only grow.
    """

    __slots__ = ("column", "limit", "receiver", "since", "steady", "variant")

    def __init__(self, variant: Variant, columns: _IntArray, num_ranks: int, bucket: int) -> None:
        self.variant = variant
        self.column = columns[variant.role] + num_ranks * variant.sends
        self.receiver = columns[variant.receiver]
        self.steady = np.maximum(variant.started, int(_STEADY * bucket))
        self.since = [0]
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
        self._nearly_full = int(bucket_bytes * _STEADY) - bucket_bytes // 16
        # By step; columns are the ranks as receivers, then the ranks as senders.
        self._used = np.zeros((64, 2 * len(self._place)), dtype=np.int64)
        self._started = np.zeros((64, len(self._place)), dtype=np.int64)  # bytes, now or later, of tensors placed there
        self._num_steps = 0
        self._open = np.zeros(len(self._place), dtype=np.int64)  # receiver -> first step that may have room
        self._since: dict[tuple[Variant, bytes], list[int]] = {}

    def flow(self, variant: Variant, crew: Crew) -> Flow:
        """Prepare a variant for the tensors of one crew."""
        columns = np.array([self._place[rank] for rank in crew], dtype=np.int64)
        flow = Flow(variant, columns, len(self._place), self._bucket)
        flow.since = self._since.setdefault((variant, flow.receiver.tobytes()), flow.since)
        return flow

    def place(self, flow: Flow) -> int:
        """The step in which this tensor starts; its moves follow at their lags."""
        variant = flow.variant
        if variant.lags is not None:
            # Larger than a bucket: it gets steps of its own, after everything so far.
            start = self._num_steps
            self._reach(start + max(variant.lags))
            self._open[:] = self._num_steps
            return start
        if not flow.receiver.size:
            return 0
        step = max(flow.since[0], int((self._open[flow.receiver] - variant.wave).max(initial=0)))
        only_receivers = True
        while True:
            self._reach(step + variant.last)
            # What a step starts leaves room for its own forwards, so that in the long run both kinds flow side by side.
            started = self._started[step + variant.wave, flow.receiver] + variant.started
            crowded = started > flow.steady
            if not crowded.any():
                used = self._used[step + variant.lag, flow.column] + variant.nbytes
                over = used > flow.limit
                if not over.any():
                    break
                only_receivers = only_receivers and not over[variant.sends].any()
            else:
                # A step with some room left is kept open for smaller tensors.
                full = crowded & (started - variant.started > self._nearly_full)
                np.maximum.at(self._open, flow.receiver[full], (step + variant.wave + 1)[full])
            step += 1
            if only_receivers:
                flow.since[0] = step
        self._started[step + variant.wave, flow.receiver] = started
        self._used[step + variant.lag, flow.column] = used
        return step

    def _reach(self, step: int) -> None:
        while step >= len(self._used):
            self._used = np.concatenate((self._used, np.zeros_like(self._used)))
            self._started = np.concatenate((self._started, np.zeros_like(self._started)))
        self._num_steps = max(self._num_steps, step + 1)


def _added_up(*key: _IntArray, nbytes: _IntArray) -> tuple[_IntArray, _IntArray]:
    """The distinct keys, ascending, [part, key], and the bytes of each."""
    if not nbytes.size:
        return np.zeros((len(key), 0), dtype=np.int64), nbytes
    sizes = tuple(int(part.max()) + 1 for part in key)
    keys, place = np.unique(np.ravel_multi_index(key, sizes), return_inverse=True)
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, place, nbytes)
    return np.stack(np.unravel_index(keys, sizes)), total


def _array(values: Iterable[int]) -> _IntArray:
    return np.array(list(values), dtype=np.int64)


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
