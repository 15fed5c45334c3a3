"""The published reshard: a call per tensor, two pipeline stages at a time, then the rest by gather-and-broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.routing import RouteKind, RoutePolicy, decide_routes
from nemo_rl_reshard.simulate.baselines import gather_broadcast
from nemo_rl_reshard.simulate.baselines.gather_broadcast import GatherBroadcastLoad
from nemo_rl_reshard.simulate.constants import Constants
from nemo_rl_reshard.simulate.simulation import PHASES, Simulation
from nemo_rl_reshard.simulate.stages import StageLoad, measure_stage, stages_of
from nemo_rl_reshard.simulate.streams import Interval, Job, run
from nemo_rl_reshard.simulate.timeline import Segment, from_segments
from nemo_rl_reshard.simulate.volumes import Volumes
from nemo_rl_reshard.simulate.wiring import Wiring
from nemo_rl_reshard.topology import Topology

NUM_STREAMS = 2
"""NeMo RL's default of NRL_REFIT_NUM_STREAMS."""


@dataclass(frozen=True)
class PublishedLoad:
    """What a refit of the published design asks of the links: the bulk by stage, and the rest."""

    stages: tuple[StageLoad, ...]
    rest: GatherBroadcastLoad
    trainers_rate: float
    """Bytes per second of all trainers' NICs, one way."""
    engines_rate: float
    """The same of the engines' NICs."""
    engines_fast_rate: float
    """The same of the engines' fast links."""
    num_engine_ranks: int


def measure(source: Catalog, target: Catalog, topology: Topology, architecture: str | None = None) -> PublishedLoad:
    """The load of these two sides: feed-forward projections in bulk, everything else afterwards."""
    routes = decide_routes(source, target, RoutePolicy.FFN, architecture)
    names = [name for name in target.specs if name in source.layouts]
    bulk = [name for name in names if routes[name].kind is RouteKind.DIRECT]
    rest = [name for name in names if routes[name].kind is RouteKind.LEFTOVER]
    wiring = Wiring.of(topology, source.ranks, target.ranks)
    volumes = Volumes(wiring.domain_of)
    return PublishedLoad(
        stages=tuple(measure_stage(stage, source, target, wiring, volumes) for stage in stages_of(bulk, source)),
        rest=gather_broadcast.measure(rest, source, target, topology),
        trainers_rate=wiring.network_rate(source.ranks),
        engines_rate=wiring.network_rate(target.ranks),
        engines_fast_rate=len(target.ranks) * wiring.fast_rate,
        num_engine_ranks=len(target.ranks),
    )


def simulate_published(
    source: Catalog,
    target: Catalog,
    topology: Topology,
    constants: Constants,
    *,
    architecture: str | None = None,
    num_streams: int = NUM_STREAMS,
) -> Simulation:
    """One refit of the published design, of every tensor that the target names and the source holds."""
    return simulate_load(measure(source, target, topology, architecture), constants, num_streams)


def simulate_load(load: PublishedLoad, constants: Constants, num_streams: int = NUM_STREAMS) -> Simulation:
    """One refit of the published design with this load."""
    jobs = [job_of(stage, constants) for stage in load.stages]
    intervals = run(jobs, num_streams)
    bulk_s = intervals[-1].stop_s if intervals else 0.0
    parts = gather_broadcast.parts_of(load.rest, constants)
    phases = dict.fromkeys(PHASES, 0.0)
    phases["overhead"] = constants.refit_s
    phases["leftover"] = parts.seconds
    for interval in intervals:
        for phase, seconds in _split(interval, jobs, load.stages, constants).items():
            phases[phase] += seconds
    seconds = constants.refit_s + bulk_s + parts.seconds
    segments = [
        *_segments(intervals, load, constants),
        *gather_broadcast.segments_of(load.rest, parts, constants.refit_s + bulk_s),
    ]
    names = {
        "network": "network of the bulk",
        "fast": "fast links of the engines",
        "install": "staging copies of the bulk",
        "leftover": "leftovers after the bulk",
        "overhead": "calls and fixed costs",
        "pack": "packing",
    }
    return Simulation(
        seconds=seconds,
        phases=phases,
        bottleneck=names[max(phases, key=lambda phase: phases[phase])],
        timeline=from_segments(segments, seconds),
    )


def job_of(stage: StageLoad, constants: Constants) -> Job:
    """The seconds of one stage by itself."""
    return Job(
        idle_s=stage.num_pieces * constants.piece_s + stage.copied / constants.copy_bytes_per_s,
        sent_s=stage.sent_s,
        received_s=stage.received_s,
        fast_s=stage.fast_s,
    )


def _split(
    interval: Interval, jobs: Sequence[Job], stages: Sequence[StageLoad], constants: Constants
) -> dict[str, float]:
    """The seconds of an interval by phase: a shared link that never rests has all of them, else by what jobs do."""
    seconds = interval.stop_s - interval.start_s
    if interval.saturated:
        return {interval.saturated: seconds}
    found = {"network": 0.0, "fast": 0.0, "install": 0.0, "overhead": 0.0}
    for i in interval.running:
        job, calls_s = jobs[i], stages[i].num_pieces * constants.piece_s
        share = seconds / len(interval.running) / job.alone_s
        found["fast" if job.fast_s >= max(job.sent_s, job.received_s) else "network"] += share * job.moving_s
        found["overhead"] += share * calls_s
        found["install"] += share * (job.idle_s - calls_s)
    return found


def _segments(intervals: Iterable[Interval], load: PublishedLoad, constants: Constants) -> list[Segment]:
    """What the links do during the bulk: only the trainers of the running stages send."""
    segments = []
    for interval in intervals:
        seconds = interval.stop_s - interval.start_s
        if seconds <= 0:
            continue
        moved = [(load.stages[i], part) for i, part in zip(interval.running, interval.done, strict=True)]
        copy_rate = load.num_engine_ranks * constants.copy_bytes_per_s
        levels = {
            ("network send", "trainers"): sum(stage.sent_total * part for stage, part in moved) / load.trainers_rate,
            ("network receive", "inference"): sum(stage.received_total * part for stage, part in moved)
            / load.engines_rate,
            ("fast", "inference"): sum(stage.fast_total * part for stage, part in moved) / load.engines_fast_rate,
            ("install", "inference"): sum(stage.installed_total * part for stage, part in moved) / copy_rate,
        }
        start_s, stop_s = interval.start_s + constants.refit_s, interval.stop_s + constants.refit_s
        segments += [
            Segment(link, group, start_s, stop_s, busy_s / seconds) for (link, group), busy_s in levels.items()
        ]
    return segments
