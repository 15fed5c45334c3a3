"""`plan`: what a refit moves, as a table for people and as JSON for programs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from nemo_rl_reshard.cli.plan_tables import print_summary
from nemo_rl_reshard.cli.spec import read_spec
from nemo_rl_reshard.cli.stable_json import write_json
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.statistics import statistics, transfers_to_plain


def run_plan(
    spec_file: Path, json_file: Path | None, console: Console, *, with_transfers: bool, picture: Path | None = None
) -> None:
    """Plan, print, and write JSON and a picture if asked.

    Raises ConfigError or PlanError before anything is written.
    """
    spec = read_spec(spec_file)
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    check_plan(plan, spec.source, spec.target, spec.routes, spec.topology)
    summary = statistics(plan, spec.source, spec.target, spec.topology)
    if with_transfers:
        summary["transfers"] = transfers_to_plain(plan)
    if json_file is not None:
        write_json(json_file, summary)
    if picture is not None:
        from nemo_rl_reshard.cli.plan_plot import draw_load

        draw_load(summary, spec, picture)
    print_summary(summary, spec, console)
