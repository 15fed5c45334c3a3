"""Recurrence: when every rank starts and ends what each step of a plan asks of its links and its memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.plan.step_loads import StepLoads
from nemo_rl_reshard.simulate.seconds import StepSeconds, step_seconds
from nemo_rl_reshard.topology import Topology

FloatArray = NDArray[np.float64]

WINDOW_STEPS = 2
"""Steps under way together: staging holds what is on the wire, and what is packed or unpacked meanwhile."""


@dataclass(frozen=True)
class Work:
    """What one kind of resource does: start, stop and busy seconds, each [num_steps, num resources].

    Where a resource is idle in a step, start and stop are both the end of what it did before.
    """

    start: FloatArray
    stop: FloatArray
    busy: FloatArray

    @property
    def end_s(self) -> float:
        """When the last of them falls silent."""
        return float(self.stop.max(initial=0.0))

    @property
    def busiest(self) -> tuple[float, int]:
        """(busy seconds, number) of the resource with the most to do; the first of equals."""
        totals = self.busy.sum(axis=0)
        most = int(totals.argmax()) if totals.size else 0
        return (float(totals[most]) if totals.size else 0.0), most


@dataclass(frozen=True)
class Clock:
    """The work of a whole plan. The network's resources are NICs, in the order of `seconds.nics`; all others ranks."""

    seconds: StepSeconds
    pack: Work
    network_send: Work
    network_receive: Work
    fast_send: Work
    fast_receive: Work
    install: Work
    end_s: float
    """When the last rank has installed what the last step brought."""

    @property
    def first_wire_s(self) -> float:
        """When the first byte leaves a rank; the end if none does."""
        begun = [work.start[work.busy > 0] for work in (self.network_send, self.fast_send)]
        return min((float(start.min()) for start in begun if start.size), default=self.end_s)


class _Lane:
    """Resources of one kind while the steps go by: each does one step's share after the other, in order."""

    def __init__(self, busy: FloatArray) -> None:
        self.busy = busy
        self.start = np.zeros_like(busy)
        self.stop = np.zeros_like(busy)
        self._free = np.zeros(busy.shape[1])

    def take(self, step: int, ready: FloatArray) -> FloatArray:
        """Do step `step` no earlier than `ready`, one time per resource; when each is done, 0 for idle ones."""
        busy = self.busy[step]
        active = busy > 0
        begin = np.where(active, np.maximum(self._free, ready), self._free)
        self._free = begin + busy
        self.start[step], self.stop[step] = begin, self._free
        return np.where(active, self._free, 0.0)

    def first_start(self, step: int) -> float:
        """When the first of them begins step `step`; 0 if all are idle."""
        active = self.busy[step] > 0
        return float(self.start[step][active].min()) if active.any() else 0.0

    def done(self) -> Work:
        return Work(self.start, self.stop, self.busy)


def run_clock(loads: StepLoads, topology: Topology, window_steps: int = WINDOW_STEPS) -> Clock:
    """Let the steps go by.

    There is no barrier between steps: each NIC, fast link and memory takes its share of a step as soon as it is free
    and what it needs is there. What a rank sends has been packed; what a rank forwards arrived in the step before;
    what a step brings has arrived when the slowest sender of the step is done, a latency later. A step begins no
    earlier than the one `window_steps` before it ended everywhere, since its staging is then used again.
    """
    seconds = step_seconds(loads, topology)
    pack, install = _Lane(seconds.pack), _Lane(seconds.install)
    network_send, network_receive = _Lane(seconds.network_send), _Lane(seconds.network_receive)
    fast_send, fast_receive = _Lane(seconds.fast_send), _Lane(seconds.fast_receive)
    num_ranks = len(loads.ranks)
    arrived_before = np.zeros(num_ranks)
    ends: list[float] = []
    for step in range(len(seconds.pack)):
        gate = ends[step - window_steps] if step >= window_steps else 0.0
        packed = np.maximum(pack.take(step, np.full(num_ranks, gate)), gate)
        ready = np.maximum(packed, arrived_before)
        sent = network_send.take(step, seconds.latest_of_nics(np.where(loads.network_sent[step] > 0, ready, 0.0)))
        coming = np.full(len(seconds.nics), network_send.first_start(step))
        received = seconds.of_ranks(network_receive.take(step, coming))
        arrived = _arrived(received, sent.max(initial=0.0), topology.network_latency_s)
        handed = fast_send.take(step, ready)
        taken = fast_receive.take(step, np.full(num_ranks, fast_send.first_start(step)))
        # Fast exchanges of different domains do not wait for each other.
        arrived_fast = _arrived(taken, seconds.latest_of_domains(handed), topology.fast_latency_s)
        arrived_before = np.maximum(arrived, arrived_fast)
        installed = install.take(step, np.maximum(arrived_before, gate))
        latest = max(float(part.max(initial=0.0)) for part in (packed, sent, handed, arrived_before, installed))
        ends.append(max(latest, ends[-1] if ends else 0.0))
    return Clock(
        seconds,
        pack.done(),
        network_send.done(),
        network_receive.done(),
        fast_send.done(),
        fast_receive.done(),
        install.done(),
        ends[-1] if ends else 0.0,
    )


def _arrived(received: FloatArray, slowest: FloatArray | np.float64, latency_s: float) -> FloatArray:
    """When what each rank received is there: its own link and the slowest sender are done; 0 for who got nothing."""
    return np.where(received > 0, np.maximum(received, slowest) + latency_s, 0.0)
