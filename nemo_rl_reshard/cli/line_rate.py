"""The line rate of a transport: given bytes over given rank pairs, from warm contiguous buffers, nothing else to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch

from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Pending, Transport


class LineRate:
    """One rank's part: `bytes_between` gives the bytes of every (source, receiver) pair of the world."""

    def __init__(self, transport: Transport, bytes_between: Mapping[tuple[int, int], int], in_flight: int) -> None:
        self._transport = transport
        self._pairs = {pair: nbytes for pair, nbytes in bytes_between.items() if transport.rank in pair}
        self._in_flight = in_flight
        rank = transport.rank
        largest = max((nbytes for (src, _), nbytes in self._pairs.items() if src == rank), default=0)
        self._leaving = torch.zeros(largest, dtype=torch.uint8)
        self._landing = {
            src: torch.zeros(nbytes, dtype=torch.uint8) for (src, dst), nbytes in self._pairs.items() if dst == rank
        }

    def run(self, chunk_bytes: int, deadline: Deadline) -> None:
        """Move everything once in messages of `chunk_bytes`, all pairs at once, in an order that all ranks share."""
        size, rank = self._transport.size, self._transport.rank
        chunks = sorted(
            (start, (dst - src) % size, src, dst)
            for (src, dst), nbytes in self._pairs.items()
            for start in range(0, nbytes, chunk_bytes)
        )
        receives = deque(chunk for chunk in chunks if chunk[3] == rank)
        sends = deque(chunk for chunk in chunks if chunk[2] == rank)
        receiving: deque[tuple[tuple[int, int, int, int], Pending]] = deque()
        sending: deque[tuple[tuple[int, int, int, int], Pending]] = deque()
        while receives or sends or receiving or sending:
            while receives and len(receiving) < self._in_flight:
                start, turn, src, dst = receives.popleft()
                buffer = self._landing[src][start : start + chunk_bytes]
                receiving.append(((start, turn, src, dst), self._transport.receive(buffer, src)))
            while sends and len(sending) < self._in_flight:
                start, turn, src, dst = sends.popleft()
                buffer = self._leaving[start : min(start + chunk_bytes, self._pairs[src, dst])]
                sending.append(((start, turn, src, dst), self._transport.send(buffer, dst)))
            oldest = receiving if receiving and (not sending or receiving[0][0] < sending[0][0]) else sending
            oldest.popleft()[1].wait(deadline)
