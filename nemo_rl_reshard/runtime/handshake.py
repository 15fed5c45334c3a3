"""Agreement of all ranks of a refit world: everyone says the same, or everyone learns who said what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from nemo_rl_reshard.errors import HandshakeError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport

Statement = Mapping[str, Any]
"""Field -> plain value, compared for equality across ranks."""

_DIGEST_BYTES = 16


class Agreement:
    """One rank's seat in the agreements of one generation of a refit world.

    Ranks meet in the same order everywhere. A meeting is one small collective of digests; only when they differ, or
    somebody stays away, do the ranks turn to the store to learn who said what. That keeps a meeting short in a large
    world, and it also proves the transport before the first weight moves.
    """

    def __init__(self, transport: Transport, store: Store, generation: int) -> None:
        self._transport = transport
        self._store = store
        self._namespace = f"agreement/{generation}"
        self._meeting = 0

    def reach(self, topic: str, statement: Statement, deadline: Deadline) -> None:
        """Return once all ranks made an equal statement.

        Raises HandshakeError naming every field that differs, with the ranks behind each value;
        TransportTimeoutError naming the ranks that did not come; RefitAbortedError if one called the refit off.
        """
        size = self._transport.size
        self._meeting += 1
        self._store.set(self._present(self._transport.rank), str(self._meeting))
        said = json.dumps(statement, sort_keys=True)
        digest = hashlib.blake2b(said.encode(), digest_size=_DIGEST_BYTES).digest()
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self._transport.device)
        everyone = torch.empty(size * _DIGEST_BYTES, dtype=torch.uint8, device=self._transport.device)
        try:
            self._transport.all_gather(everyone, own, tuple(range(size))).wait(deadline)
        except TransportTimeoutError as fault:
            raise self._timed_out(topic, deadline) from fault
        if everyone.cpu().numpy().tobytes() != digest * size:
            self._explain(topic, said, deadline)

    def _explain(self, topic: str, said: str, deadline: Deadline) -> None:
        """Read what every rank said and raise HandshakeError."""
        prefix = f"{self._namespace}/{self._meeting}"
        keys = [f"{prefix}/{rank}" for rank in range(self._transport.size)]
        self._store.set(keys[self._transport.rank], said)
        try:
            self._store.wait(keys, timedelta(seconds=max(0.001, deadline.remaining_s())))
        except DistStoreError as fault:  # torch's own stores; ours raises what we raise
            raise self._timed_out(topic, deadline) from fault
        faults = differences([json.loads(self._store.get(key)) for key in keys])
        raise HandshakeError("\n  - ".join([f"the ranks do not agree on {topic}", *faults]))

    def _timed_out(self, topic: str, deadline: Deadline) -> TransportTimeoutError:
        absent = [rank for rank in range(self._transport.size) if not self._came(rank)]
        return TransportTimeoutError(
            f"rank {self._transport.rank}: agreeing on {topic} passed its deadline of {deadline.budget_s:g} s; "
            f"ranks {absent} did not come"
        )

    def _came(self, rank: int) -> bool:
        key = self._present(rank)
        return bool(self._store.check([key])) and int(self._store.get(key)) >= self._meeting

    def _present(self, rank: int) -> str:
        return f"{self._namespace}/present/{rank}"


def differences(statements: Sequence[Statement]) -> list[str]:
    """One sentence for every field on which the statements of ranks 0, 1, ... differ."""
    faults = []
    for name in sorted({name for statement in statements for name in statement}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, statement in enumerate(statements):
            ranks_by_value.setdefault(json.dumps(statement.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            said = "; ".join(f"ranks {ranks} say {value}" for value, ranks in ranks_by_value.items())
            faults.append(f"{name}: {said}")
    return faults
