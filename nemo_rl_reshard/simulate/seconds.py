"""StepSeconds: the loads of a plan's steps as seconds of NICs, fast links and memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.plan.step_loads import StepLoads
from nemo_rl_reshard.topology import Topology

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

WINDOW_MESSAGES = 16
"""Messages that a rank has in flight together and that so share one latency; the executor's default."""
PACK_PASSES = 2
"""Packing reads and writes what a rank sends."""
INSTALL_PASSES = 3
"""Installing reads and writes what a rank receives; post-load work passes over it once more."""


@dataclass(frozen=True)
class StepSeconds:
    """Busy seconds, [num_steps, num NICs] for the network and [num_steps, num ranks] for everything else.

    `nics` names each NIC by the lowest rank on it, ascending; `ranks` ascend.
    """

    ranks: tuple[int, ...]
    nics: tuple[int, ...]
    nic_of_rank: IntArray
    """Position in `nics`, by rank."""
    domain_of_rank: IntArray
    """Number of the domain, by rank."""
    network_send: FloatArray
    network_receive: FloatArray
    fast_send: FloatArray
    fast_receive: FloatArray
    pack: FloatArray
    install: FloatArray

    def of_ranks(self, by_nic: FloatArray) -> FloatArray:
        """Each rank's NIC's value."""
        return by_nic[self.nic_of_rank]

    def latest_of_nics(self, by_rank: FloatArray) -> FloatArray:
        """By NIC, the largest value of the ranks that share it."""
        latest = np.zeros(len(self.nics))
        np.maximum.at(latest, self.nic_of_rank, by_rank)
        return latest

    def latest_of_domains(self, by_rank: FloatArray) -> FloatArray:
        """By rank, the largest value of the ranks of its domain."""
        latest = np.zeros(int(self.domain_of_rank.max(initial=0)) + 1)
        np.maximum.at(latest, self.domain_of_rank, by_rank)
        return latest[self.domain_of_rank]


def step_seconds(loads: StepLoads, topology: Topology) -> StepSeconds:
    """How long each step keeps each resource busy, with links at `wire_efficiency` of nominal.

    A link is busy for its bytes, or for the latencies of its messages where those are longer: `WINDOW_MESSAGES` of them
    share one. Ranks on one NIC add up their bytes.
    """
    nic_of, domain_of = topology.nics_with(loads.ranks), topology.domains_with(loads.ranks)
    nics = tuple(sorted({nic_of[rank] for rank in loads.ranks}))
    place = {nic: index for index, nic in enumerate(nics)}
    nic_of_rank = np.array([place[nic_of[rank]] for rank in loads.ranks], dtype=np.int64)
    network = topology.network_bytes_per_s * topology.wire_efficiency
    fast = topology.fast_bytes_per_s * topology.wire_efficiency
    memory = topology.memory_bytes_per_s
    sent, received = loads.network_sent + loads.fast_sent, loads.network_received + loads.fast_received

    def link(nbytes: IntArray, messages: IntArray, everything: IntArray, rate: float, latency_s: float) -> FloatArray:
        # Messages are counted over both links; each link has the part that its bytes have.
        share = np.divide(nbytes, everything, out=np.zeros(nbytes.shape), where=everything > 0)
        waiting: FloatArray = messages * share * (latency_s / WINDOW_MESSAGES)
        return np.maximum(nbytes / rate, waiting)

    def nic(nbytes: IntArray, messages: IntArray, everything: IntArray) -> FloatArray:
        alone = link(nbytes, messages, everything, network, topology.network_latency_s)
        summed = np.zeros((len(nbytes), len(nics)))
        longest = np.zeros((len(nbytes), len(nics)))
        np.add.at(summed.T, nic_of_rank, nbytes.T / network)
        np.maximum.at(longest.T, nic_of_rank, alone.T)
        return np.maximum(summed, longest)

    return StepSeconds(
        ranks=loads.ranks,
        nics=nics,
        nic_of_rank=nic_of_rank,
        domain_of_rank=np.array([domain_of[rank] for rank in loads.ranks], dtype=np.int64),
        network_send=nic(loads.network_sent, loads.messages_sent, sent),
        network_receive=nic(loads.network_received, loads.messages_received, received),
        fast_send=link(loads.fast_sent, loads.messages_sent, sent, fast, topology.fast_latency_s),
        fast_receive=link(loads.fast_received, loads.messages_received, received, fast, topology.fast_latency_s),
        pack=PACK_PASSES * sent / memory,
        install=(INSTALL_PASSES * received + PACK_PASSES * loads.local_bytes) / memory,
    )
