"""Prediction: how long one refit takes by a simple model whose every term is stated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.traffic import Traffic
from nemo_rl_reshard.topology import Link, Topology


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds by phase, each without what another phase hides, so that they sum to `seconds`."""

    pack_s: float
    network_s: float
    fast_s: float
    leftover_s: float
    install_s: float
    bottleneck: str

    @property
    def seconds(self) -> float:
        """The whole refit."""
        return self.pack_s + self.network_s + self.fast_s + self.leftover_s + self.install_s


def predict(plan: Plan, direct: Traffic, leftover: Traffic, topology: Topology) -> Prediction:
    """Predict one refit on warm buffers.

    Links run at `wire_efficiency` of nominal; one rank's sends and receives run side by side.
    - network: the busiest direction of any NIC, plus one latency per step.
    - pack: reading and writing what a rank sends, hidden behind the network but for the first message.
    - fast: the busiest direction of any rank, hidden behind the network but for the last step's share, plus a latency.
    - leftover: after the bulk; gather and broadcast at link rate, each network byte not hidden by anything.
    - install: what a rank receives is read, written and passed over once more by post-load work.
    """
    rate = topology.network_bytes_per_s * topology.wire_efficiency
    fast_rate = topology.fast_bytes_per_s * topology.wire_efficiency
    memory = topology.memory_bytes_per_s
    steps = max(plan.num_steps, 1)
    network_bytes, bottleneck = _busiest(direct, Link.NETWORK, topology)
    fast_bytes, fast_bottleneck = _busiest(direct, Link.FAST, topology)
    network = network_bytes / rate + (steps * topology.network_latency_s if network_bytes else 0.0)
    fast = fast_bytes / fast_rate
    packed = max((direct.sent[Link.NETWORK] + direct.sent[Link.FAST]).values(), default=0)
    pack = 2 * packed / memory
    message = min(plan.options.largest_message, packed)
    left_network, left_bottleneck = _busiest(leftover, Link.NETWORK, topology)
    left_fast, _ = _busiest(leftover, Link.FAST, topology)
    left = left_network / rate + left_fast / fast_rate
    inbound: Counter[int] = Counter()
    for traffic in (direct, leftover):
        for link in Link:
            inbound += traffic.received[link]
    exposed_fast = max(fast - network, fast / steps)
    terms = {
        f"network {bottleneck}": network,
        f"fast {fast_bottleneck}": exposed_fast,
        f"leftovers: network {left_bottleneck}": left,
    }
    return Prediction(
        pack_s=max(pack - network, 2 * message / memory),
        network_s=network,
        fast_s=exposed_fast + (topology.fast_latency_s if fast_bytes else 0.0),
        leftover_s=left + (2 * topology.network_latency_s if left_network else 0.0),
        install_s=3 * max(inbound.values(), default=0) / memory,
        bottleneck=max(terms, key=lambda term: (terms[term], term)) if any(terms.values()) else "nothing to move",
    )


def _busiest(traffic: Traffic, link: Link, topology: Topology) -> tuple[int, str]:
    """The most bytes that one rank, or one NIC's ranks together, send or receive over `link`, and who that is."""
    sent, received, who = traffic.sent[link], traffic.received[link], "rank"
    if link is Link.NETWORK and topology.ranks_per_nic > 1:
        nic_of = topology.nics_with({*sent, *received})
        sent, received, who = _folded(sent, nic_of), _folded(received, nic_of), "the NIC of rank"
    loads = [(nbytes, -rank, f"send of {who} {rank}") for rank, nbytes in sent.items()]
    loads += [(nbytes, -rank, f"receive of {who} {rank}") for rank, nbytes in received.items()]
    nbytes, _, busiest = max(loads, default=(0, 0, "idle"))
    return nbytes, busiest


def _folded(loads: Counter[int], nic_of: Mapping[int, int]) -> Counter[int]:
    folded: Counter[int] = Counter()
    for rank, nbytes in loads.items():
        folded[nic_of[rank]] += nbytes
    return folded
