"""Seconds and memory to plan a refit of every tensor by its own name at cluster scale.

    python benchmarks/plan_scale.py [--json OUT] [--row NAME ...] [--nemo-rl CHECKOUT]

Prints, for each row: reading the model and laying out both sides, a plan with its proof, and one rank's program.
Wall seconds of one process; run it with nothing beside it, on one core with `taskset -c 0`. With a NeMo RL checkout
the planner of its Python reshard gets the same layouts, and what one rank does there stands beside ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nemo_rl_reshard.cli.refit_spec import RefitSpec
from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.plan.transfer import RankProgram

ROWS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "deepseek-v3, 256 -> 256": {
            "model": {"preset": "deepseek-v3"},
            "source": {"backend": "megatron", "world": 256, "pp": 16, "ep": 16},
            "target": {"backend": "vllm", "world": 256, "tp": 32, "dp": 8},
            "topology": {"preset": "dgx-h100"},
            "route": "all",
        },
        "kimi-k3-2.8t, 1,024 -> 1,024": {
            "model": {"preset": "kimi-k3-2.8t"},
            "source": {"backend": "megatron", "world": 1024, "pp": 16, "ep": 64},
            "target": {"backend": "vllm", "world": 1024, "tp": 32, "dp": 32},
            "topology": {"preset": "dgx-h100"},
            "route": "all",
        },
    }
)


def measure(plain: Mapping[str, Any]) -> tuple[dict[str, float], RefitSpec, dict[str, RankProgram]]:
    """Plan one row: the figures, what was planned, and an engine rank's and a trainer rank's program."""
    marks = [time.perf_counter()]

    def lap() -> float:
        marks.append(time.perf_counter())
        return marks[-1] - marks[-2]

    spec = parse_spec(dict(plain))
    # What reading the model left on the heap is no part of planning.
    gc.collect()
    gc.freeze()
    found = {"num_tensors": float(len(spec.target.specs)), "read and lay out": lap()}
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    found["plan"] = lap()
    check_plan(plan, spec.source, spec.target, spec.routes, spec.topology)
    found["prove"] = lap()
    found["plan and prove"] = found["plan"] + found["prove"]
    programs = {"engine rank": lower(plan, plan.targets[-1])}
    found["program of an engine rank"] = lap()
    programs["trainer rank"] = lower(plan, plan.sources[0])
    found["program of a trainer rank"] = lap()
    found["num_transfers"] = float(sum(len(plan.templates[row.template].variants[row.variant]) for row in plan.placed))
    found["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return found, spec, programs


def main() -> None:
    """Measure the rows and print them; memory is the most of the process so far, before NeMo RL's planner runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", choices=list(ROWS), action="append")
    parser.add_argument("--nemo-rl", type=Path, help="a NeMo RL checkout whose planner to run on the same layouts")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in options.row or ROWS:
        found, spec, programs = measure(ROWS[name])
        results[name] = dict(found)
        print(name, *(f"{key} {value:,.2f}" for key, value in found.items()), sep="\n  ", flush=True)
        if options.nemo_rl:
            from peer_planner import beside  # with torch, which ours does without

            results[name]["nemo_rl"] = beside(options.nemo_rl, ROWS[name], spec, programs)
            print_beside(found, results[name]["nemo_rl"])
        gc.unfreeze()
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


def print_beside(ours: Mapping[str, float], peer: Mapping[str, Any]) -> None:
    """What one rank does in NeMo RL, then the same in ours."""
    print(
        f"  NeMo RL's Python reshard: {peer['entries']:,} tensors, experts stacked, for {peer['names']:,} of the "
        f"names; {peer['plans']} different plans, {peer['striped']} of them striped over replicas"
    )
    for reason, left in peer["left_out"].items():
        print(f"    left out, {reason}: {left['names']:,} names, {left['nbytes'] / 1e9:.2f} GB")
    for note in peer["notes"]:
        print(f"    {note}")
    for rank, both in peer["ranks"].items():
        theirs, mine = both["nemo_rl"], both["ours"]
        made_s = ours["plan and prove"] + ours[f"program of an {rank}" if rank[0] == "e" else f"program of a {rank}"]
        print(
            f"    {rank}, NeMo RL: plans {theirs['entries']:,} tensors in {theirs['plan_s']:.3f} s; all but the bytes "
            f"{theirs['first_refit_s']:.3f} s in the first refit, {theirs['later_refit_s']:.3f} s in every later one\n"
            f"      {theirs['messages']:,} messages and {theirs['exchanges']:,} exchanges among replicas: "
            f"{theirs['received_bytes'] / 1e9:.2f} GB received, {theirs['exchanged_bytes'] / 1e9:.2f} GB exchanged, "
            f"{theirs['sent_bytes'] / 1e9:.2f} GB sent"
        )
        print(
            f"    {rank}, ours: plan, proof and program {made_s:.2f} s once, {made_s / theirs['first_refit_s']:.0f} "
            f"times NeMo RL's first refit; nothing in a refit\n"
            f"      {mine['messages']:,} messages for the same names: {mine['received_bytes'] / 1e9:.2f} GB received, "
            f"{mine['sent_bytes'] / 1e9:.2f} GB sent"
        )


if __name__ == "__main__":
    main()
