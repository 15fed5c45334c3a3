"""Seconds and memory to plan a refit of every tensor by its own name at cluster scale.

    python benchmarks/plan_scale.py [--json OUT] [--row NAME ...]

Prints, for each row: reading the model and laying out both sides, a plan with its proof, and one rank's program.
Wall seconds of one process; run it with nothing beside it, on one core with `taskset -c 0`.
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

from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.planner import make_plan

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


def measure(plain: Mapping[str, Any]) -> dict[str, float]:
    """Plan one row."""
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
    lower(plan, plan.targets[-1])
    found["program of an engine rank"] = lap()
    lower(plan, plan.sources[0])
    found["program of a trainer rank"] = lap()
    found["num_transfers"] = float(sum(len(plan.templates[row.template].variants[row.variant]) for row in plan.placed))
    return found


def main() -> None:
    """Measure the rows and print them; memory is the most of the process so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", choices=list(ROWS), action="append")
    options = parser.parse_args()
    results = {}
    for name in options.row or ROWS:
        results[name] = measure(ROWS[name])
        results[name]["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(name, *(f"{key} {value:,.2f}" for key, value in results[name].items()), sep="\n  ", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
