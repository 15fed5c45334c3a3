"""Two states of the planner, one executor: their schedules for the same move, in turn, in one set of processes.

    git worktree add --detach ../before COMMIT
    python benchmarks/two_planners.py --other ../before [--move ffn|experts] [--rounds 25] [--json OUT]

This checkout plans, the other one plans in a process of its own and says its transfers and their steps; lowering and
executor are this checkout's for both. Rounds take turns in who goes first, so other load on the machine hits both; the
ratio is taken round by round. Eight processes over gloo. `ffn` is the move of move_512mib.py; in `experts` four
trainers of two pipeline stages hold 384 matrices of experts whole, four engine ranks need slices, and attention too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from planned_move import MOVES, written_plan

import nemo_rl_reshard
from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, explicit_ranks
from nemo_rl_reshard.cli.line_rate import LineRate
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.cli.spec import RefitSpec, parse_spec
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.plan.codec import seal
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import Move, Placed, Plan, Template
from nemo_rl_reshard.plan.step_loads import step_loads
from nemo_rl_reshard.runtime.session import RankSession
from nemo_rl_reshard.runtime.world import World, join_processes
from nemo_rl_reshard.topology import Link
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport

LIMIT_S = 300.0
LINE_CHUNK = 8 << 20
HERE, OTHER, LINE = "here", "other", "line rate"


@dataclass(frozen=True)
class Work:
    """One rank's part: what it is handed out, by who planned, and what every pair of ranks exchanges."""

    explicit: ExplicitRank
    handouts: Mapping[str, Any]
    between: Mapping[tuple[int, int], int]
    in_flight: int
    rounds: int


def read_plan(written: list[Any], spec: RefitSpec) -> Plan:
    """The plan of these transfers, a template for each tensor, for lowering and executor to run as any other."""
    by_tensor: dict[str, list[Any]] = {}
    for tensor, offset, extent, *rest in written:
        by_tensor.setdefault(tensor, []).append((Region(tuple(offset), tuple(extent)), *rest))
    crew = tuple(sorted({*spec.source.ranks, *spec.target.ranks}))
    templates, placed = [], []
    for index, (tensor, transfers) in enumerate(by_tensor.items()):
        first = min(step for *_, step in transfers)
        pieces = tuple(dict.fromkeys(region for region, *_ in transfers))
        place = {region: number for number, region in enumerate(pieces)}
        moves = tuple(
            Move(place[region], crew.index(src), crew.index(dst), Link(link), step - first)
            for region, src, dst, link, step in transfers
        )
        shape = spec.target.specs[tensor].shape
        templates.append(Template(shape, spec.target.specs[tensor].item_size, pieces, (moves,)))
        placed.append(Placed(tensor, index, 0, 0, first))
    return seal(
        Plan(
            options=spec.options,
            specs=spec.target.specs,
            templates=tuple(templates),
            crews=(crew,),
            placed=tuple(sorted(placed, key=lambda row: row.step)),
            leftovers=(),
            skipped={},
            sources=spec.source.ranks,
            targets=spec.target.ranks,
        )
    )


def written_there(checkout: Path, move: str) -> list[Any]:
    """`written_plan` of another checkout, in a process of its own."""
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("planned_move.py")), move],
        env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
        stdout=subprocess.PIPE,
        check=True,
    )
    plain: list[Any] = json.loads(ended.stdout)
    return plain


def run_rank(work: Work, world: dict[str, Any]) -> dict[str, list[float]]:
    """One rank's process: seconds of every round by name. Raises AssertionError for a wrong element."""
    live = LiveRank(work.explicit, join_processes)
    sessions = {name: live.session if name == HERE else _session(live) for name in work.handouts}
    for generation, (name, session) in enumerate(sessions.items(), start=1):
        session.connect({**world, "generation": generation})
        session.adopt(work.handouts[name])
    transport = join_processes(World.from_plain({**world, "generation": len(sessions) + 1})).transport
    line = LineRate(transport, work.between, work.in_flight)
    live.fill(0)
    seconds: dict[str, list[float]] = {}
    for turn in range(work.rounds + 1):
        runs: dict[str, Callable[[], Any]] = {
            name: partial(session.refit, {"version": turn, "deadline_s": LIMIT_S, "verify": "off", "seed": 0})
            for name, session in sessions.items()
        }
        runs[LINE] = partial(line.run, LINE_CHUNK, Deadline.after(LIMIT_S))
        for name in sorted(runs, reverse=bool(turn % 2)):
            _meet(transport)
            start_s = time.perf_counter()
            runs[name]()
            _meet(transport)
            seconds.setdefault(name, []).append(time.perf_counter() - start_s)
    for name, session in sessions.items():
        live.fill(0)
        session.refit({"version": work.rounds + 1, "deadline_s": LIMIT_S, "verify": "full", "seed": 0})
        wrong, _ = live.differences(0)
        assert not wrong, (name, wrong[:3])
    return {name: found[1:] for name, found in seconds.items()}


def _session(live: LiveRank) -> RankSession:
    """One more session over the same memory."""
    session = RankSession(live.made_of.rank, source=live.source, target=live.target, join=join_processes)
    if live.source is not None:
        session.declare()
    if live.target is not None:
        session.declare([[spec.name, list(spec.shape), spec.dtype] for spec in live.made_of.source_specs])
    return session


def _meet(transport: Transport) -> None:
    """Return once all ranks have come."""
    deadline = Deadline.after(LIMIT_S)
    token = torch.zeros(1, dtype=torch.uint8)
    others = range(1, transport.size) if transport.rank == 0 else [0]
    for turn in ("receive", "send") if transport.rank == 0 else ("send", "receive"):
        for pending in [getattr(transport, turn)(token.clone(), rank) for rank in others]:
            pending.wait(deadline)


def main() -> None:
    """Plan twice, run both in turn, print medians and the ratio of every round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, required=True, help="a checkout in another state")
    parser.add_argument("--move", choices=list(MOVES), default="ffn")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    spec = parse_spec(MOVES[asked.move]())
    plans = {
        name: read_plan(written, spec)
        for name, written in (
            (HERE, written_plan(asked.move)),
            (OTHER, written_there(asked.other, asked.move)),
        )
    }
    ranks, others = (
        explicit_ranks(spec.source, spec.target, plan, in_flight=asked.in_flight) for plan in plans.values()
    )
    between: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for message in lower(plans[HERE], rank.label).messages:
            if message.src == rank.label != message.dst:
                between[message.src, message.dst] = between.get((message.src, message.dst), 0) + message.nbytes
    work = [
        Work(rank, {HERE: rank.handout, OTHER: other.handout}, between, asked.in_flight, asked.rounds)
        for rank, other in zip(ranks, others, strict=True)
    ]
    before = os.getloadavg()[0]
    times = run_ranks(run_rank, work, num_trainers=4, timeout_s=900, deadline_s=LIMIT_S)
    rounds = {name: [max(rank[name][turn] for rank in times) for turn in range(asked.rounds)] for name in times[0]}
    ratios = [mine / theirs for mine, theirs in zip(rounds[HERE], rounds[OTHER], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    print(f"executor: {Path(nemo_rl_reshard.__file__).parent}; move {asked.move}; {asked.rounds} rounds; load {before}")
    for name in (HERE, OTHER, LINE):
        counted = ""
        if name in plans:
            messages = sum(len(lower(plans[name], rank).messages) for rank in plans[name].sources)
            loads = step_loads(plans[name])
            sent, received = loads.network_sent / 2**20, loads.network_received / 2**20
            busiest = np.maximum(sent.max(axis=1), received.max(axis=1)).sum()
            counted = (
                f", {plans[name].num_steps} steps, {messages} messages from trainers; a rank sends {sent.max():.0f} "
                f"MiB in a step at most; the busiest link of each step, added up: {busiest:.0f} MiB"
            )
        print(f"  {name:10s} {median(rounds[name]):.3f} s{counted}")
    print(f"  here / other, round by round: {median(ratios):.3f}, the middle half {low:.3f} to {high:.3f}")
    if asked.json:
        asked.json.write_text(json.dumps({"seconds": rounds, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
