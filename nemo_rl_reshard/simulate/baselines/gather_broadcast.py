"""Gather-and-broadcast: every trainer gathers each whole tensor, one of them broadcasts it to all engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.simulate.constants import Constants
from nemo_rl_reshard.simulate.layout_pairs import layout_pairs
from nemo_rl_reshard.simulate.simulation import PHASES, Simulation
from nemo_rl_reshard.simulate.timeline import Segment, from_segments
from nemo_rl_reshard.simulate.volumes import Volumes
from nemo_rl_reshard.simulate.wiring import Wiring
from nemo_rl_reshard.topology import Topology


@dataclass(frozen=True)
class GatherBroadcastLoad:
    """What gathering and broadcasting some tensors asks of the links, whatever they reach.

    Seconds are at nominal network rate and at the fast links' achieved rate. `gather_network_s` is that of the domain
    with the most to bring in, through all NICs of its trainers; `broadcast_network_s` goes through the NICs of the
    weakest domain on the broadcast's way, the root's own included.
    """

    nbytes: int
    num_tensors: int
    gather_network_s: float
    gather_fast_s: float
    broadcast_network_s: float
    broadcast_fast_s: float
    load_s: float
    gather_busy: float
    """Part of all trainers' NICs that is receiving while the busiest domain's are."""


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of one gather-and-broadcast, one after the other."""

    gather_s: float
    broadcast_s: float
    load_s: float
    tensors_s: float
    network_s: float
    """Of gather and broadcast, what waits for NICs; the rest waits for fast links."""

    @property
    def seconds(self) -> float:
        """All parts."""
        return self.gather_s + self.broadcast_s + self.load_s + self.tensors_s


def measure(names: Iterable[str], source: Catalog, target: Catalog, topology: Topology) -> GatherBroadcastLoad:
    """The load of gathering and broadcasting the tensors `names` of these two sides."""
    wiring = Wiring.of(topology, source.ranks, target.ranks)
    volumes = Volumes(wiring.domain_of)
    trainers = wiring.domains(source.ranks)
    num_tensors = nbytes = 0
    in_domain: Counter[int] = Counter()
    on_rank: Counter[int] = Counter()
    for pair in layout_pairs(names, source, target):
        num_tensors += pair.num_tensors
        nbytes += pair.nbytes
        for domain, regions in volumes.regions_of_domains(pair.source, pair.shape).items():
            in_domain[domain] += volumes.union(regions) * pair.bytes_per_element
        for rank, elements in volumes.of_ranks(pair.source, pair.shape).items():
            on_rank[rank] += elements * pair.bytes_per_element
    network = {
        domain: (nbytes - in_domain[domain]) / wiring.nominal_network_rate(members)
        for domain, members in trainers.items()
    }
    fast = max(
        (
            nbytes - on_rank[rank] - (nbytes - in_domain[domain]) / len(members)
            for domain, members in trainers.items()
            for rank in members
        ),
        default=0.0,
    )
    gather_network_s = max(network.values(), default=0.0)
    gathered = sum(nbytes - in_domain[domain] for domain in trainers)
    capacity = gather_network_s * wiring.nominal_network_rate(source.ranks)
    outside = {domain: members for domain, members in wiring.domains(target.ranks).items() if domain not in trainers}
    root = trainers[wiring.domain_of[min(source.ranks)]] if source.ranks else ()
    return GatherBroadcastLoad(
        nbytes=nbytes,
        num_tensors=num_tensors,
        gather_network_s=gather_network_s,
        gather_fast_s=max(fast, 0.0) / wiring.fast_rate,
        broadcast_network_s=nbytes / min(wiring.nominal_network_rate(way) for way in (root, *outside.values()))
        if outside
        else 0.0,
        broadcast_fast_s=max(
            (nbytes * (1 - 1 / len(members)) for members in outside.values()),
            default=float(nbytes),
        )
        / wiring.fast_rate,
        # Unpacked from the bucket into the weights: each byte is read and written.
        load_s=2 * nbytes / topology.memory_bytes_per_s,
        gather_busy=gathered / capacity if capacity else 0.0,
    )


def parts_of(load: GatherBroadcastLoad, constants: Constants) -> Parts:
    """The seconds of a load: its parts follow one another, as each bucket goes through all of them."""
    gather_network_s = load.gather_network_s / constants.collective_fraction
    broadcast_network_s = load.broadcast_network_s / constants.collective_fraction
    return Parts(
        gather_s=max(gather_network_s, load.gather_fast_s),
        broadcast_s=max(broadcast_network_s, load.broadcast_fast_s),
        load_s=load.load_s,
        tensors_s=load.num_tensors * constants.tensor_s,
        network_s=sum(
            network_s
            for network_s, fast_s in (
                (gather_network_s, load.gather_fast_s),
                (broadcast_network_s, load.broadcast_fast_s),
            )
            if network_s >= fast_s
        ),
    )


def segments_of(load: GatherBroadcastLoad, parts: Parts, start_s: float) -> list[Segment]:
    """What the links do from `start_s` on: buckets run through all parts, so every part is busy all the time."""
    stop_s = start_s + parts.seconds
    if parts.seconds <= 0:
        return []
    share = 1 / parts.seconds
    gather = load.gather_network_s * load.gather_busy * share
    broadcast = load.broadcast_network_s * share
    levels = {
        ("network receive", "trainers"): gather,
        ("network send", "trainers"): gather,
        ("network receive", "inference"): broadcast,
        ("fast", "trainers"): load.gather_fast_s * share,
        ("fast", "inference"): load.broadcast_fast_s * share,
        ("install", "inference"): parts.load_s * share,
    }
    return [Segment(link, group, start_s, stop_s, level) for (link, group), level in levels.items()]


def simulate_gather_broadcast(source: Catalog, target: Catalog, topology: Topology, constants: Constants) -> Simulation:
    """One conventional refit of every tensor that the target names and the source holds."""
    names = [name for name in target.specs if name in source.layouts]
    return simulate_load(measure(names, source, target, topology), constants)


def simulate_load(load: GatherBroadcastLoad, constants: Constants) -> Simulation:
    """One conventional refit with this load."""
    parts = parts_of(load, constants)
    seconds = constants.refit_s + parts.seconds
    phases = dict.fromkeys(PHASES, 0.0)
    phases["network"] = parts.network_s
    phases["fast"] = parts.gather_s + parts.broadcast_s - parts.network_s
    phases["install"] = parts.load_s
    phases["overhead"] = parts.tensors_s + constants.refit_s
    longest = {
        "gather among trainers": parts.gather_s,
        "broadcast from one domain": parts.broadcast_s,
        "loading": parts.load_s,
        f"preparing {load.num_tensors} tensors one by one": parts.tensors_s,
    }
    return Simulation(
        seconds=seconds,
        phases=phases,
        bottleneck=max(longest, key=lambda part: longest[part]),
        timeline=from_segments(segments_of(load, parts, constants.refit_s), seconds),
    )
