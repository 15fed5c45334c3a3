"""Naive point-to-point: every engine rank gets its shards straight from trainers, as if domains did not exist."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.simulate.constants import Constants
from nemo_rl_reshard.simulate.layout_pairs import LayoutPair, layout_pairs
from nemo_rl_reshard.simulate.simulation import PHASES, Simulation
from nemo_rl_reshard.simulate.timeline import Segment, from_segments
from nemo_rl_reshard.simulate.volumes import Volumes
from nemo_rl_reshard.simulate.wiring import Wiring
from nemo_rl_reshard.topology import Topology


@dataclass
class PointToPointLoad:
    """By rank: shards that it prepares as a trainer, and bytes."""

    pieces: Counter[int] = field(default_factory=Counter)
    network_sent: Counter[int] = field(default_factory=Counter)
    network_received: Counter[int] = field(default_factory=Counter)
    fast_received: Counter[int] = field(default_factory=Counter)

    def add(self, pair: LayoutPair, volumes: Volumes, wiring: Wiring) -> None:
        """Count the tensors of one pair. Replicas of a shard share its sending; one in a needer's domain does all."""
        for rank in pair.source.ranks:
            self.pieces[rank] += pair.num_tensors
        needed = volumes.holders(pair.target, pair.shape)
        for region, holders in volumes.holders(pair.source, pair.shape).items():
            near = {wiring.domain_of[rank] for rank in holders}
            far_bytes = 0
            for wanted, needers in needed.items():
                common = region.intersect(wanted)
                if common is None:
                    continue
                nbytes = common.numel * pair.bytes_per_element
                for rank in needers:
                    if wiring.domain_of[rank] not in near:
                        far_bytes += nbytes
                        self.network_received[rank] += nbytes
                    elif rank not in holders:
                        self.fast_received[rank] += nbytes
            if far_bytes:
                for rank in holders:
                    self.network_sent[rank] += far_bytes / len(holders)  # type: ignore[assignment]


def measure(source: Catalog, target: Catalog, wiring: Wiring) -> PointToPointLoad:
    """The load of every tensor that the target names and the source holds."""
    volumes = Volumes(wiring.domain_of)
    names = [name for name in target.specs if name in source.layouts]
    load = PointToPointLoad()
    for pair in layout_pairs(names, source, target):
        load.add(pair, volumes, wiring)
    return load


def simulate_point_to_point(source: Catalog, target: Catalog, topology: Topology, constants: Constants) -> Simulation:
    """One refit of all tensors, shard to shard, all trainers at once, one call after the other.

    A call moves nothing while its shards are prepared and staged; then its links run at `wire_efficiency`.
    """
    wiring = Wiring.of(topology, source.ranks, target.ranks)
    load = measure(source, target, wiring)
    links = {
        "network send": wiring.busiest_nic(load.network_sent),
        "network receive": wiring.busiest_nic(load.network_received),
        "fast": (max(load.fast_received.values(), default=0) / wiring.fast_rate, -1),
    }
    link = max(links, key=lambda name: links[name][0])
    moving_s, rank = links[link]
    staged = max((load.network_received + load.fast_received).values(), default=0)
    packed = max(load.network_sent.values(), default=0)
    copy_s = max(staged, packed) / constants.copy_bytes_per_s
    phases = dict.fromkeys(PHASES, 0.0)
    phases["fast" if link == "fast" else "network"] = moving_s
    phases["install"] = copy_s
    phases["overhead"] = constants.refit_s + max(load.pieces.values(), default=0) * constants.piece_s
    seconds = sum(phases.values())
    levels = {
        ("network send", "trainers"): load.network_sent.total() / wiring.network_rate(source.ranks),
        ("network receive", "inference"): load.network_received.total() / wiring.network_rate(target.ranks),
        ("fast", "inference"): load.fast_received.total() / (len(target.ranks) * wiring.fast_rate),
        ("install", "inference"): copy_s,
    }
    lasting_s = seconds - constants.refit_s
    segments = [
        Segment(name, group, constants.refit_s, seconds, busy_s / lasting_s)
        for (name, group), busy_s in levels.items()
        if lasting_s > 0
    ]
    where = f"{link} of rank {rank}" if rank >= 0 else "fast links of the engines"
    waits = {where: moving_s, "staging copies": copy_s, "calls and fixed costs": phases["overhead"]}
    return Simulation(
        seconds=seconds,
        phases=phases,
        bottleneck=max(waits, key=lambda name: waits[name]),
        timeline=from_segments(segments, seconds),
    )
