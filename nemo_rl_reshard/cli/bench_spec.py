"""The engine of `bench`: reshard, gather-and-broadcast and the line rate, in turn, in one set of real processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, explicit_ranks
from nemo_rl_reshard.cli.line_rate import LineRate
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.cli.refit_spec import RefitSpec, require_room_for
from nemo_rl_reshard.errors import ConfigError, VerificationError
from nemo_rl_reshard.layout.tiling import volume
from nemo_rl_reshard.params.routing import Route, RouteKind
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.plan.traffic import conventional_traffic
from nemo_rl_reshard.runtime.handout import DEFAULT_IN_FLIGHT
from nemo_rl_reshard.runtime.leftover_plan import Gather, LeftoverProgram
from nemo_rl_reshard.runtime.session import RankSession
from nemo_rl_reshard.runtime.world import World, join_processes
from nemo_rl_reshard.topology import Link
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport

Result = TypeVar("Result")

RESHARD, GATHER_BROADCAST, GATHER_TO_ROOT = "reshard", "gather_broadcast", "gather_to_root"
BACKENDS = (RESHARD, GATHER_BROADCAST, GATHER_TO_ROOT)
LINE_CHUNKS = tuple(mib << 20 for mib in (2, 4, 8, 16))
"""Message sizes tried for the line rate; the best one counts."""

_ROUND_S = 300.0


@dataclass(frozen=True)
class BenchRank:
    """What one rank's process needs. `handouts` by backend; `bytes_between` is what the reshard moves."""

    explicit: ExplicitRank
    handouts: Mapping[str, Mapping[str, Any]]
    bytes_between: Mapping[tuple[int, int], int]
    in_flight: int
    repeats: int


@dataclass(frozen=True)
class _RankTimes:
    """Seconds of every round by name, from all ranks ready to all ranks done; extra bytes and phases by backend."""

    seconds: dict[str, list[float]]
    extra_bytes: dict[str, int]
    phases: dict[str, dict[str, float]]


def bench_spec(
    spec: RefitSpec, *, repeats: int = 5, in_flight: int = DEFAULT_IN_FLIGHT, timeout_s: float = 1800.0
) -> dict[str, Any]:
    """Measure `spec` with one process per rank over gloo; the JSON of `bench`.

    Every round runs all of it in turn after one round that warms buffers up; medians of `repeats` rounds. After the
    last, a fully verified refit proves that what was timed is right. Raises ValueError for fewer than 5 repeats,
    ConfigError if nothing travels, EnvironmentLacksError if it does not fit into memory, VerificationError for wrong
    bytes, and what `run_ranks` raises.
    """
    if repeats < 5:
        raise ValueError(f"medians need at least 5 repeats, not {repeats}")
    require_room_for(spec)
    leftover = {name: Route(RouteKind.LEFTOVER, "baseline: every tensor") for name in spec.target.specs}
    plans = {
        RESHARD: make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options),
        GATHER_BROADCAST: make_plan(spec.source, spec.target, leftover, spec.topology, spec.options, broadcast=True),
    }
    made = {
        RESHARD: explicit_ranks(spec.source, spec.target, plans[RESHARD], in_flight=in_flight),
        GATHER_BROADCAST: explicit_ranks(spec.source, spec.target, plans[GATHER_BROADCAST], in_flight=in_flight),
        GATHER_TO_ROOT: explicit_ranks(
            spec.source, spec.target, plans[GATHER_BROADCAST], in_flight=in_flight, gather=Gather.ROOT
        ),
    }
    between = _bytes_between(plans[RESHARD], made[RESHARD])
    if not any(between.values()):
        raise ConfigError("nothing to measure: no byte travels between ranks of this spec")
    ranks = [
        BenchRank(
            explicit=explicit,
            handouts={backend: made[backend][explicit.rank].handout for backend in BACKENDS},
            bytes_between=between,
            in_flight=in_flight,
            repeats=repeats,
        )
        for explicit in made[RESHARD]
    ]
    times: list[_RankTimes] = run_ranks(
        bench_rank, ranks, num_trainers=len(spec.source.ranks), timeout_s=timeout_s, deadline_s=_ROUND_S
    )
    labels = [rank.explicit.label for rank in ranks]
    domain_of = spec.topology.domains_with({*spec.source.ranks, *spec.target.ranks})
    baseline = conventional_traffic(list(spec.target.specs), spec.source, spec.target, domain_of)
    moved = {
        RESHARD: sum(between.values()),
        GATHER_BROADCAST: sum(baseline.total(link) for link in Link),
        GATHER_TO_ROOT: _gather_to_root_bytes(spec),
    }
    result = _summary(times, moved, labels)
    return {"schema": 1, "digest": plans[RESHARD].digest, "repeats": repeats, "in_flight": in_flight, **result}


def _gather_to_root_bytes(spec: RefitSpec) -> int:
    """Bytes received when one trainer alone gathers what it lacks, and broadcasts."""
    root, receivers = min(spec.source.ranks), len(spec.target.ranks)
    total = 0
    for name, wire in spec.target.specs.items():
        held = volume(spec.source.layouts[name].regions_of(root)) * wire.item_size
        total += wire.nbytes * receivers + max(0, wire.nbytes - held)
    return total


def bench_rank(rank: BenchRank, world: dict[str, Any]) -> _RankTimes:
    """One rank's process: all rounds. The backends share weights and have transports and buffers of their own."""
    line_seat = join_processes(World.from_plain({**world, "generation": len(BACKENDS) + 1}))
    transport = line_seat.transport
    live = LiveRank(rank.explicit, join_processes)
    sessions = {RESHARD: live.session}
    for backend in BACKENDS[1:]:
        sessions[backend] = RankSession(rank.explicit.rank, source=live.source, target=live.target, join=join_processes)
        if live.source is not None:
            sessions[backend].declare()
        if live.target is not None:
            sessions[backend].declare([[s.name, list(s.shape), s.dtype] for s in rank.explicit.source_specs])
    for generation, (backend, session) in enumerate(sessions.items(), start=1):
        session.connect({**world, "generation": generation})
        session.adopt(rank.handouts[backend])
    live.fill(0)
    line = LineRate(transport, rank.bytes_between, rank.in_flight)
    result = _RankTimes({}, {}, {})
    for turn in range(rank.repeats + 1):
        for chunk in LINE_CHUNKS:
            seconds, _ = _timed(transport, partial(line.run, chunk, Deadline.after(_ROUND_S)))
            result.seconds.setdefault(f"line_rate/{chunk}", []).append(seconds)
        for backend, session in sessions.items():
            order = {"version": turn, "deadline_s": _ROUND_S, "verify": "off", "seed": 0}
            seconds, report = _timed(transport, partial(session.refit, order))
            result.seconds.setdefault(backend, []).append(seconds)
            result.extra_bytes[backend] = report["peak_extra_bytes"]
            result.phases[backend] = report["phases"]
    for backend, session in sessions.items():
        if live.target is not None:
            for shards in live.target.shards.values():
                for _, values in shards:
                    values.reshape(-1).view(torch.uint8).fill_(0xA5)
        _meet(transport)
        session.refit({"version": rank.repeats + 1, "deadline_s": _ROUND_S, "verify": "full", "seed": 0})
        wrong, _ = live.differences(0)
        if wrong:
            raise VerificationError("\n  - ".join([f"{backend} moved wrong bytes", *wrong]))
    for session in sessions.values():
        session.close()
    line_seat.leave()
    return result


def _timed(transport: Transport, work: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds from the moment all ranks are ready to the moment all are done, and what `work` returns."""
    _meet(transport)
    start_s = time.perf_counter()
    result = work()
    _meet(transport)
    return time.perf_counter() - start_s, result


def _meet(transport: Transport) -> None:
    """Return once all ranks have come."""
    deadline = Deadline.after(_ROUND_S)
    token = torch.zeros(1, dtype=torch.uint8)
    if transport.rank:
        transport.send(token, 0).wait(deadline)
        transport.receive(token, 0).wait(deadline)
        return
    others = range(1, transport.size)
    for pending in [transport.receive(torch.zeros(1, dtype=torch.uint8), rank) for rank in others]:
        pending.wait(deadline)
    for pending in [transport.send(token, rank) for rank in others]:
        pending.wait(deadline)


def _bytes_between(plan: Plan, ranks: Sequence[ExplicitRank]) -> dict[tuple[int, int], int]:
    """Bytes of every pair of ranks under the reshard plan, leftovers' broadcasts counted as sent by their root."""
    index = {each.label: each.rank for each in ranks}
    between: Counter[tuple[int, int]] = Counter()
    for transfer in plan.transfers():
        if transfer.src != transfer.dst:
            nbytes = transfer.region.numel * plan.specs[transfer.tensor].item_size
            between[index[transfer.src], index[transfer.dst]] += nbytes
    leftovers = LeftoverProgram.from_plain(ranks[0].handout["leftovers"])
    for batch in leftovers.batches:
        for trainer in leftovers.trainers:
            for other in leftovers.trainers:
                if other != trainer:
                    between[trainer, other] += batch.share_nbytes
        for receiver in leftovers.receivers:
            if receiver != leftovers.root:
                between[leftovers.root, receiver] += batch.nbytes
    return dict(between)


def _summary(times: list[_RankTimes], moved: Mapping[str, int], labels: list[int]) -> dict[str, Any]:
    """What `bench` reports, from the rounds of all ranks; the first round is left out."""
    by_name = {
        name: [max(rank.seconds[name][turn] for rank in times) for turn in range(1, len(seconds))]
        for name, seconds in times[0].seconds.items()
    }
    line_name = min((name for name in by_name if name.startswith("line_rate/")), key=lambda n: median(by_name[n]))
    line_s = median(by_name[line_name])
    reshard_s, baseline_s = median(by_name[RESHARD]), median(by_name[GATHER_BROADCAST])
    line_bytes_per_s = moved[RESHARD] / line_s
    return {
        "seconds": {
            "reshard": reshard_s,
            "gather_broadcast": baseline_s,
            "gather_to_root_broadcast": median(by_name[GATHER_TO_ROOT]),
            "line_rate": line_s,
        },
        "all_seconds": by_name,
        "bytes": {
            "reshard": moved[RESHARD],
            "gather_broadcast": moved[GATHER_BROADCAST],
            "gather_to_root_broadcast": moved[GATHER_TO_ROOT],
        },
        "line_bytes_per_s": line_bytes_per_s,
        "line_rate_message_bytes": int(line_name.rsplit("/", 1)[1]),
        "gather_broadcast_fraction_of_line_rate": moved[GATHER_BROADCAST] / line_bytes_per_s / baseline_s,
        "speedup_vs_gather_broadcast": baseline_s / reshard_s,
        "speedup_vs_gather_to_root_broadcast": median(by_name[GATHER_TO_ROOT]) / reshard_s,
        "fraction_of_line_rate": line_s / reshard_s,
        "peak_extra_bytes": {
            str(label): rank.extra_bytes[RESHARD] for label, rank in zip(labels, times, strict=True)
        },
        "gather_broadcast_peak_extra_bytes": {
            str(label): rank.extra_bytes[GATHER_BROADCAST] for label, rank in zip(labels, times, strict=True)
        },
        "phases_of_last_refit": {
            str(label): rank.phases[RESHARD] for label, rank in zip(labels, times, strict=True)
        },
    }  # fmt: skip
