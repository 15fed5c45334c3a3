"""Every rank of a transport sends to every other, with bytes that tell where they belong."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport

LENGTHS = (0, 1, 4099, 17, 65536, 3, (3 << 20) + 1)


def uneven(src: int, dst: int, number: int) -> int:
    """Bytes of a message that differ by pair and number: some none, some large."""
    return LENGTHS[(src + 2 * dst + 3 * number) % len(LENGTHS)]


def code(src: int, dst: int, number: int, nbytes: int) -> torch.Tensor:
    """Bytes that tell their pair, their message and their place."""
    period = 251  # a prime, so that no chunk of a power of two looks like its neighbour
    pattern = (torch.arange(period) + src * 31 + dst * 17 + number * 5).to(torch.uint8)
    return pattern.repeat(-(-nbytes // period))[:nbytes]


def exchange(
    transport: Transport, nbytes_of: Callable[[int, int, int], int], num_messages: int, timeout_s: float
) -> bool:
    """Every rank sends `num_messages` to every other, all in flight at once; whether all came whole and in order."""
    deadline = Deadline.after(timeout_s)
    others = [peer for peer in range(transport.size) if peer != transport.rank]
    pending, arrived = [], []
    for number in range(num_messages):
        for peer in others:
            nbytes = nbytes_of(peer, transport.rank, number)
            buffer = torch.full((nbytes,), 255, dtype=torch.uint8)
            pending.append(transport.receive(buffer, peer))
            arrived.append((buffer, code(peer, transport.rank, number, nbytes)))
            nbytes = nbytes_of(transport.rank, peer, number)
            pending.append(transport.send(code(transport.rank, peer, number, nbytes), peer))
    for one in pending:
        one.wait(deadline)
        one.wait(deadline)  # a second wait returns at once
    return all(torch.equal(buffer, expected) for buffer, expected in arrived)
