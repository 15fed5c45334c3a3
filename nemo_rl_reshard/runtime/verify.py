"""Verification of one refit: digests of what was sent against digests of what was written, rank to rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_rl_reshard.errors import FaultList, VerificationError
from nemo_rl_reshard.plan.transfer import Message, Part
from nemo_rl_reshard.runtime.order import RefitOrder, VerifyMode
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Pending, Transport
from nemo_rl_reshard.transport.staging import wire_bytes

DIGEST_BYTES = 8
PEERS_AT_ONCE = 64
"""Ranks with which digests are exchanged together, each way."""
ONE_IN = 16
"""A sample takes one tensor in this many; another choice at every version and seed."""


def digest(values: Tensor) -> bytes:
    """Digest of the elements of `values` in row-major order, whatever its strides."""
    flat = wire_bytes(values.contiguous())
    return hashlib.blake2b(flat.cpu().numpy().data, digest_size=DIGEST_BYTES).digest()


@dataclass
class _Pair:
    """Digests of one direction between two ranks, in the order of the messages."""

    parts: list[Part] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)

    def joined(self) -> Tensor:
        """All digests, one after the other."""
        return torch.frombuffer(bytearray(b"".join(self.digests)), dtype=torch.uint8)


class Verification:
    """Collects digests while the messages run, then compares them between every pair of ranks that exchanged any.

    Both ends pick the same parts, since the choice depends on order and tensor alone. A rank that forwards is the
    sender of what it forwards, so a fault is reported where it happened.
    """

    def __init__(self, mode: VerifyMode, version: int, seed: int, transport: Transport) -> None:
        self._mode = mode
        self._salt = f"{version}/{seed}/"
        self._transport = transport
        self._sent: dict[int, _Pair] = {}
        self._received: dict[int, _Pair] = {}
        self.num_compared = 0
        self.faults = FaultList(f"rank {transport.rank}: weights differ after the refit", VerificationError)

    @classmethod
    def of(cls, order: RefitOrder, transport: Transport) -> Verification:
        """What `order` asks for."""
        return cls(order.verify, order.version, order.seed, transport)

    @property
    def is_on(self) -> bool:
        """Whether anything is compared; also whether staging is filled with a pattern before bytes arrive."""
        return self._mode is not VerifyMode.OFF

    def picks(self, tensor: str) -> bool:
        """Whether `tensor` is compared in this refit."""
        if self._mode is not VerifyMode.SAMPLE:
            return self._mode is VerifyMode.FULL
        drawn = hashlib.blake2b((self._salt + tensor).encode(), digest_size=4).digest()
        return int.from_bytes(drawn, "little") % ONE_IN == 0

    def sent(self, message: Message, part: Part, values: Tensor) -> None:
        """Note what left, in the wire dtype, as taken from the trainer's storage or from where it was received."""
        self._note(self._sent, message.dst, part, values)

    def received(self, message: Message, part: Part, values: Tensor) -> None:
        """Note what was written, read back from the target."""
        self._note(self._received, message.src, part, values)

    def compare(self, deadline: Deadline) -> None:
        """Exchange the digests of this refit. Raises VerificationError listing every region that differs."""
        transport = self._transport
        rank, size, device = transport.rank, transport.size, transport.device
        pending: list[Pending] = []
        theirs: dict[int, Tensor] = {}
        for src, pair in self._received.items():
            theirs[src] = torch.zeros(len(pair.digests) * DIGEST_BYTES, dtype=torch.uint8, device=device)
        # By how far apart ranks are, so that both ends of a pair come together; a bounded number of pairs at a time.
        for first in range(1, size, PEERS_AT_ONCE):
            with transport.together():
                for apart in range(first, min(first + PEERS_AT_ONCE, size)):
                    src, dst = (rank - apart) % size, (rank + apart) % size
                    if src in theirs:
                        pending.append(transport.receive(theirs[src], src))
                    if dst in self._sent:
                        pending.append(transport.send(self._sent[dst].joined().to(device), dst))
        if rank in theirs:
            theirs[rank].copy_(self._sent[rank].joined())
        for operation in pending:
            operation.wait(deadline)
        for src, pair in self._received.items():
            said = theirs[src].cpu().numpy().tobytes()
            for place, (part, found) in enumerate(zip(pair.parts, pair.digests, strict=True)):
                self.num_compared += 1
                if said[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] != found:
                    self.faults.add(
                        f"{part.tensor}: region {part.region.offset}+{part.region.extent} is not what rank {src} sent"
                    )
        self._sent.clear()
        self._received.clear()
        self.faults.raise_if_any()

    def _note(self, pairs: dict[int, _Pair], peer: int, part: Part, values: Tensor) -> None:
        if self.picks(part.tensor):
            pair = pairs.setdefault(peer, _Pair())
            pair.parts.append(part)
            pair.digests.append(digest(values))
