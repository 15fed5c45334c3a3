"""Seconds from a plan at cluster scale to ranks that can start: what the driver does once, and every rank by itself.

    python benchmarks/plan_handout.py [--json OUT] [--row NAME ...]

Prints, for each row of `plan_scale.py`: writing the text that all ranks get, cutting the rounds that NCCL needs, and
how long one rank of each side takes to check the text and lower its program. Wall seconds of one process; run it with
nothing beside it.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plan_scale import ROWS

from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.plan.message_counts import message_counts
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.assignment import Assignment
from nemo_rl_reshard.runtime.handout import hand_out


def measure(plain: Mapping[str, Any]) -> dict[str, float]:
    """Hand out the plan of one row."""
    spec = parse_spec(dict(plain))
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    # What planning left on the heap is no part of this.
    gc.collect()
    gc.freeze()
    marks = [time.perf_counter()]

    def lap() -> float:
        marks.append(time.perf_counter())
        return marks[-1] - marks[-2]

    handout = hand_out(plan, spec.source)
    found = {"hand out": lap()}
    in_rounds = hand_out(plan, spec.source, in_rounds=True)
    found["hand out with rounds"] = lap()
    found["text_mb"] = len(handout.shared["plan"]) / 1e6
    found["num_rounds"] = float(len(in_rounds.shared["round_starts"]))
    found["num_messages"] = float(sum(int(counts.count.sum()) for counts in message_counts(plan)))
    lap()
    for name, rank in (("engine", plan.targets[-1]), ("trainer", plan.sources[0])):
        Assignment.from_plain(handout.of_rank(rank), rank)
        found[f"check and lower, {name} rank"] = lap()
    return found


def main() -> None:
    """Measure the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", choices=list(ROWS), action="append")
    options = parser.parse_args()
    results = {name: measure(ROWS[name]) for name in options.row or ROWS}
    for name, found in results.items():
        print(name, *(f"{key} {value:,.2f}" for key, value in found.items()), sep="\n  ", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
