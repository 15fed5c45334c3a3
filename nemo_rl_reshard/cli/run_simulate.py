"""`simulate`: how long this plan takes, beside what refits do today, from the same layouts, links and constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_rl_reshard.cli.plan_tables import print_heading
from nemo_rl_reshard.cli.quantities import seconds_text
from nemo_rl_reshard.cli.refit_spec import RefitSpec
from nemo_rl_reshard.cli.spec import read_spec
from nemo_rl_reshard.cli.stable_json import rounded, write_json
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.baselines.gather_broadcast import simulate_gather_broadcast
from nemo_rl_reshard.simulate.baselines.point_to_point import simulate_point_to_point
from nemo_rl_reshard.simulate.baselines.published import simulate_published
from nemo_rl_reshard.simulate.clock import simulate_plan
from nemo_rl_reshard.simulate.constants import FITTED, Constants
from nemo_rl_reshard.simulate.simulation import PHASES, Simulation
from nemo_rl_reshard.simulate.statistics import statistics

OURS, PUBLISHED = "this plan", "published design"
_KEYS = {
    "gather and broadcast": "gather_broadcast",
    "point to point": "point_to_point",
    PUBLISHED: "published",
    "published, calls free": "published_calls_free",
    OURS: "reshard",
}
"""What people read -> what the JSON calls it."""


def run_simulate(spec_file: Path, json_file: Path | None, picture: Path | None, console: Console) -> None:
    """Simulate, print, and write JSON and a picture if asked.

    Raises ConfigError or PlanError before anything is written.
    """
    spec = read_spec(spec_file)
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    check_plan(plan, spec.source, spec.target, spec.routes, spec.topology)
    predicted = statistics(plan, spec.source, spec.target, spec.topology)["predicted"]
    rows = simulate_designs(spec, plan)
    result = _to_plain(rows, spec, plan, predicted)
    if json_file is not None:
        write_json(json_file, result)
    if picture is not None:
        from nemo_rl_reshard.cli.simulate_plot import draw_simulation

        draw_simulation(rows, (PUBLISHED, OURS), predicted["floor_seconds"], spec, picture)
    if spec.described is not None:
        print_heading(spec, console)
    print_designs(result, console)


def simulate_designs(spec: RefitSpec, plan: Plan) -> dict[str, Simulation]:
    """Five ways to do the same refit, the plan last. All have the fixed cost per refit that published times show.

    Our plan is simulated with packing at memory speed and no cost per tensor, which is how it is meant to run and has
    not been measured on GPUs. The published design is therefore there a second time with the same privileges: what then
    remains between the two is the schedule.
    """
    sides = (spec.source, spec.target, spec.topology)
    architecture = spec.described.architecture if spec.described else None
    free = Constants(
        collective_fraction=spec.topology.wire_efficiency,
        copy_bytes_per_s=spec.topology.memory_bytes_per_s,
        tensor_s=0.0,
        piece_s=0.0,
        refit_s=FITTED.refit_s,
    )
    return {
        "gather and broadcast": simulate_gather_broadcast(*sides, FITTED),
        "point to point": simulate_point_to_point(*sides, FITTED),
        PUBLISHED: simulate_published(*sides, FITTED, architecture=architecture),
        "published, calls free": simulate_published(*sides, free, architecture=architecture),
        OURS: simulate_plan(plan, *sides, overhead_s=FITTED.refit_s),
    }


def _to_plain(
    rows: Mapping[str, Simulation], spec: RefitSpec, plan: Plan, predicted: Mapping[str, Any]
) -> dict[str, Any]:
    """JSON types only, in a fixed order."""
    floor = predicted["floor_seconds"]
    described = spec.described
    return {
        "schema": 1,
        "digest": plan.digest,
        "spec": described.title if described else None,
        "assumptions": list(described.assumptions) if described else [],
        "floor_seconds": floor,
        "floor_bottleneck": predicted["floor_bottleneck"],
        "predicted_seconds": predicted["seconds"],
        "constants": {name: rounded(value) for name, value in asdict(FITTED).items()},
        "designs": {
            _KEYS[name]: {
                "seconds": rounded(row.seconds),
                "over_floor": rounded(row.seconds / floor) if floor else None,
                "phases": {phase: rounded(row.phases[phase]) for phase in PHASES},
                "bottleneck": row.bottleneck,
                "timeline": {
                    "bin_s": rounded(row.timeline.bin_s),
                    "series": [
                        {
                            "link": series.link,
                            "group": series.group,
                            "busy": [round(float(value), 6) for value in series.busy],
                        }
                        for series in row.timeline.series
                    ],
                },
            }
            for name, row in rows.items()
        },
    }


def print_designs(result: Mapping[str, Any], console: Console) -> None:
    """The JSON of `simulate` as a table, a column per design."""
    designs, floor = [result["designs"][key] for key in _KEYS.values()], result["floor_seconds"]
    ours = designs[-1]["seconds"]
    table = Table(title="one refit, simulated", title_justify="left", header_style="bold")
    table.add_column("")
    for name in _KEYS:
        table.add_column(name, justify="right", style="bold" if name == OURS else "")
    table.add_row("seconds", *(seconds_text(row["seconds"]) for row in designs))
    if floor:
        table.add_row("x floor", *(f"{row['over_floor']:.2f}" for row in designs))
    table.add_row("x plan", *(f"{row['seconds'] / ours:.2f}" for row in designs), end_section=True)
    for phase in PHASES:
        spent = [row["phases"][phase] for row in designs]
        if any(spent):
            table.add_row(f"  {phase}", *(seconds_text(seconds) if seconds else "-" for seconds in spent))
    console.print(table)
    fixed = seconds_text(result["constants"]["refit_s"])
    console.print(
        f"floor {seconds_text(floor)} ({result['floor_bottleneck']}); "
        f"this plan waits for: {designs[-1]['bottleneck']}; "
        f"every design has the {fixed} that a refit costs whatever it moves",
        highlight=False,
    )
