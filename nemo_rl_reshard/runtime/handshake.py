"""Agreement of all ranks through the refit's store: everyone says the same, or everyone learns who said what."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from nemo_rl_reshard.errors import HandshakeError, RefitAbortedError, ReshardError, TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline

Statement = Mapping[str, Any]
"""Field -> plain value, compared for equality across ranks."""

_SLICE_S = 0.1
"""Longest wait on a store that cannot be woken by a call-off."""

_CALLED_OFF = "called_off"


class Agreement:
    """One rank's seat in the agreements of one generation of a refit world.

    Ranks meet in the same order everywhere; each meeting has a number of its own, so nothing said earlier counts.
    Rank 0 compares and publishes the verdict: every rank writes one key and reads one, whatever the world's size.
    """

    def __init__(self, store: Store, rank: int, size: int, generation: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._namespace = f"agreement/{generation}"
        self._meeting = 0
        self._previous: str | None = None

    def call_off(self, reason: str) -> None:
        """Tell ranks that wait in an agreement that this rank failed. The first reason wins. Never raises."""
        with suppress(RuntimeError, ReshardError):  # the store is gone, and with it everyone who could read this
            if not self._store.check([self._key(_CALLED_OFF)]):
                self._store.set(self._key(_CALLED_OFF), json.dumps([self._rank, reason]))

    def reach(self, topic: str, statement: Statement, deadline: Deadline) -> None:
        """Return once all ranks made an equal statement.

        Raises HandshakeError naming every field that differs, with the ranks behind each value;
        TransportTimeoutError naming the ranks that said nothing; RefitAbortedError if one called it off.
        """
        prefix = self._key(f"{self._meeting}")
        self._store.set(f"{prefix}/{self._rank}", json.dumps(statement, sort_keys=True))
        if self._rank == 0:
            keys = [f"{prefix}/{rank}" for rank in range(self._size)]
            self._wait_for(keys, f"agreement on {topic}", deadline)
            statements = [json.loads(self._store.get(key)) for key in keys]
            self._store.set(f"{prefix}/verdict", json.dumps(differences(statements)))
        self._wait_for([f"{prefix}/verdict"], f"agreement on {topic}", deadline)
        faults = json.loads(self._store.get(f"{prefix}/verdict"))
        self._forget_previous(prefix)
        if faults:
            raise HandshakeError("\n  - ".join([f"the ranks do not agree on {topic}", *faults]))

    def _wait_for(self, keys: Sequence[str], what: str, deadline: Deadline) -> None:
        """Wait in slices, so that a rank that failed elsewhere is heard on any store."""
        while True:
            try:
                self._store.wait(list(keys), timedelta(seconds=max(0.001, min(_SLICE_S, deadline.remaining_s()))))
            except (TransportTimeoutError, DistStoreError, RuntimeError) as fault:
                if isinstance(fault, ReshardError) and not isinstance(fault, TransportTimeoutError):
                    raise
            else:
                return
            if self._store.check([self._key(_CALLED_OFF)]):
                rank, reason = json.loads(self._store.get(self._key(_CALLED_OFF)))
                raise RefitAbortedError(f"rank {rank} called the refit off: {reason}")
            if deadline.remaining_s() == 0:
                raise self._timed_out(keys, what, deadline)

    def _timed_out(self, keys: Sequence[str], what: str, deadline: Deadline) -> TransportTimeoutError:
        silent = [key.rsplit("/", 1)[1] for key in keys if not self._store.check([key])]
        absent = "rank 0" if silent == ["verdict"] else f"ranks {', '.join(silent)}"
        return TransportTimeoutError(
            f"rank {self._rank}: {what} passed its deadline of {deadline.budget_s:g} s; nothing from {absent}"
        )

    def _forget_previous(self, prefix: str) -> None:
        """Everyone that reads this verdict is past the previous meeting, so its keys are of no more use."""
        self._meeting += 1
        if self._previous is not None:
            self._store.delete_key(f"{self._previous}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"{self._previous}/verdict")
        self._previous = prefix

    def _key(self, name: str) -> str:
        return f"{self._namespace}/{name}"


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
