"""StreamOrder: what a refit does on a GPU comes after what wrote the weights, and before what reads them."""

from __future__ import annotations

import time
from typing import Any

import torch

from nemo_rl_reshard.transport.deadline import Deadline

SHORTEST_NAP_S, LONGEST_NAP_S = 0.00002, 0.001
"""Between two looks at an event: the host sleeps, ever longer, so that a wait costs no core."""


class StreamOrder:
    """The rule about streams, in one place. Does nothing for weights on the CPU.

    A refit copies on the stream that is current on the thread that runs it. Whoever wrote the weights did so on that
    stream, or on the device's default stream, or has joined its streams to one of them, as torch's own training does.
    Readers may use any stream: they are kept off by the host, which does not return before the copies are complete.
    The transport orders its own streams after the current one whenever it starts something.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        """`cuda` is `torch.cuda`, or what stands in for it in a test."""
        self._cuda = cuda
        self._met: set[torch.device] = set()

    def begin(self) -> None:
        """Start a refit: what was on the devices before it may have been written since."""
        self._met.clear()

    def meet(self, device: torch.device) -> None:
        """Call before the first copy from or to `device`: it comes after whatever wrote there."""
        if device.type == "cpu" or device in self._met:
            return
        self._met.add(device)
        current, default = self._cuda.current_stream(device), self._cuda.default_stream(device)
        if current != default:
            current.wait_stream(default)

    def settle(self, deadline: Deadline, what: str) -> None:
        """Wait on the host until every copy so far is complete; only then may the host, or another stream, look.

        Raises TransportTimeoutError naming `what` by the deadline.
        """
        for device in self._met:
            event = self._cuda.Event()
            event.record(self._cuda.current_stream(device))
            nap_s = SHORTEST_NAP_S
            while not event.query():
                deadline.check(what)
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, LONGEST_NAP_S)
