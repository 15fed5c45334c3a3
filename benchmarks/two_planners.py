"""Two states of the planner, one executor: their schedules for the same move, in turn, in one set of processes.

    git worktree add --detach ../before COMMIT
    python benchmarks/two_planners.py --other ../before [--move ffn|experts] [--rounds 25] [--json OUT]

This checkout plans, the other one plans in a process of its own, and the executor of this checkout runs both. With
PYTHONPATH set to the other checkout and `--other` to this one, that one's executor runs both: a schedule that needs
anything new of the executor fails there. Rounds take turns in who goes first, so other load on the machine hits both;
the ratio is taken round by round. Eight processes over gloo. `ffn` is the move of move_512mib.py; in `experts` four
trainers of two pipeline stages hold 384 matrices of experts whole, four engine ranks need slices, and attention too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from move_512mib import move_spec

import nemo_rl_reshard
from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, explicit_ranks
from nemo_rl_reshard.cli.line_rate import LineRate
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.session import RankSession
from nemo_rl_reshard.runtime.world import World, join_processes
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport

LIMIT_S = 300.0
LINE_CHUNK = 8 << 20
HERE, OTHER, LINE = "here", "other", "line rate"


def experts_spec() -> dict[str, Any]:
    """4 layers of 32 experts and attention, 480 MiB in fp32: two stages of EP2 to two engines of TP2."""
    cut = {"ranks": [[4, 5], [6, 7]]}
    tensors = []
    for layer in range(4):
        stage = [0, 1] if layer < 2 else [2, 3]
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            dim = 1 if part == "o_proj" else 0
            tensors.append(
                {
                    "name": f"model.layers.{layer}.self_attn.{part}.weight",
                    "shape": [1024, 1536],
                    "source": {"ranks": stage, "placements": ["R"]},
                    "target": {**cut, "placements": ["R", f"S({dim})"]},
                }
            )
        for expert in range(32):
            for part in ("gate_proj", "up_proj", "down_proj"):
                down = part == "down_proj"
                tensors.append(
                    {
                        "name": f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
                        "shape": [1024, 256] if down else [256, 1024],
                        "source": {"ranks": [stage[expert // 16]], "placements": ["R"]},
                        "target": {**cut, "placements": ["R", "S(1)" if down else "S(0)"]},
                    }
                )
    return {"tensors": [{**tensor, "dtype": "float32"} for tensor in tensors], "route": "all"}


MOVES: Mapping[str, Callable[[], dict[str, Any]]] = {"ffn": partial(move_spec, 512), "experts": experts_spec}


@dataclass(frozen=True)
class Work:
    """One rank's part: its assignments by who planned, as plain values, and what every pair of ranks exchanges."""

    explicit: ExplicitRank
    assignments: Mapping[str, Any]
    between: Mapping[tuple[int, int], int]
    in_flight: int
    rounds: int


def planned(move: str, in_flight: int) -> tuple[ExplicitRank, ...]:
    """Every rank of the move, by the planner that is on the path."""
    spec = parse_spec(MOVES[move]())
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    return explicit_ranks(spec.source, spec.target, plan, in_flight=in_flight)


def planned_there(checkout: Path, move: str, in_flight: int) -> list[Any]:
    """The plain assignments of every rank, by the planner of another checkout."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "plan.json"
        subprocess.run(
            [sys.executable, __file__, "--move", move, "--in-flight", str(in_flight), "--write-plan", str(found)],
            env={**os.environ, "PYTHONPATH": str(checkout.resolve())},
            check=True,
        )
        plain: list[Any] = json.loads(found.read_text())
    return plain


def run_rank(work: Work, world: dict[str, Any]) -> dict[str, list[float]]:
    """One rank's process: seconds of every round by name. Raises AssertionError for a wrong element."""
    live = LiveRank(work.explicit, join_processes)
    sessions = {name: live.session if name == HERE else _session(live) for name in work.assignments}
    for generation, (name, session) in enumerate(sessions.items(), start=1):
        session.connect({**world, "generation": generation})
        session.adopt(work.assignments[name])
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
    parser.add_argument("--other", type=Path, help="a checkout in another state")
    parser.add_argument("--move", choices=list(MOVES), default="ffn")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write-plan", type=Path, help="only plan, and write every rank's assignment")
    asked = parser.parse_args()
    ranks = planned(asked.move, asked.in_flight)
    here = [rank.assignment.to_plain() for rank in ranks]
    if asked.write_plan:
        asked.write_plan.write_text(json.dumps(here))
        return
    if asked.other is None:
        parser.error("--other is needed: the checkout to compare with")
    there = planned_there(asked.other, asked.move, asked.in_flight)
    between: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for message in rank.assignment.program.messages:
            if message.src == rank.rank != message.dst:
                between[message.src, message.dst] = between.get((message.src, message.dst), 0) + message.nbytes
    work = [
        Work(rank, {HERE: mine, OTHER: theirs}, between, asked.in_flight, asked.rounds)
        for rank, mine, theirs in zip(ranks, here, there, strict=True)
    ]
    before = os.getloadavg()[0]
    times = run_ranks(run_rank, work, num_trainers=4, timeout_s=900, deadline_s=LIMIT_S)
    rounds = {name: [max(rank[name][turn] for rank in times) for turn in range(asked.rounds)] for name in times[0]}
    ratios = [mine / theirs for mine, theirs in zip(rounds[HERE], rounds[OTHER], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    print(f"executor: {Path(nemo_rl_reshard.__file__).parent}; move {asked.move}; {asked.rounds} rounds; load {before}")
    for name, plain in ((HERE, here), (OTHER, there), (LINE, None)):
        counted = f", {sum(len(p['program']['messages']) for p in plain) // 2} messages" if plain else ""
        print(f"  {name:10s} {median(rounds[name]):.3f} s{counted}")
    print(f"  here / other, round by round: {median(ratios):.3f}, the middle half {low:.3f} to {high:.3f}")
    if asked.json:
        asked.json.write_text(json.dumps({"seconds": rounds, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
