"""A rank that is connecting a group when the refit is called off: gloo itself cannot be interrupted there."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from equipment.thread_worlds import gloo_world, in_world

from nemo_rl_reshard.errors import RefitAbortedError
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport

LONG_S = 20.0


def test_calling_off_wakes_a_rank_that_is_connecting_a_group() -> None:
    """Rank 1 came to the meeting and gave up: rank 0 connects to nobody, and must not wait out its timeout."""
    connecting, release = threading.Event(), threading.Event()

    def body(transport: Any) -> float:
        if transport.rank == 2:
            assert connecting.wait(LONG_S)
            called_off_s = time.monotonic()
            transport.abort("the engine of rank 1 is gone")
            return called_off_s
        real = transport._backend.build

        def build(*arguments: Any) -> Any:
            if transport.rank == 0:
                connecting.set()
            release.wait(LONG_S)  # what gloo does while its peer is not there
            return real(*arguments)

        transport._backend.build = build
        own, together = torch.zeros(4, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        with pytest.raises(RefitAbortedError, match=r"^the engine of rank 1 is gone$"):
            transport.all_gather(together, own, (0, 1)).wait(Deadline.after(LONG_S))
        return time.monotonic()

    with gloo_world(3, timeout_s=LONG_S) as transports:
        *woken_s, called_off_s = in_world(transports, body)
        release.set()
        assert all(isinstance(woken, float) and woken - called_off_s < 2 for woken in woken_s), woken_s
        _refuses_more(transports)


def _refuses_more(transports: list[Transport]) -> None:
    for transport in transports:
        with pytest.raises(RefitAbortedError, match="rank 1 is gone"):
            transport.send(torch.zeros(4, dtype=torch.uint8), (transport.rank + 1) % 3)
