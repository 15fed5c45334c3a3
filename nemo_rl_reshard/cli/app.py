"""The `nemo-rl-reshard` command: its subcommands, options and exit codes. The work is done in one file per command."""

from __future__ import annotations

import sys
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nemo_rl_reshard.cli.requirements import EnvironmentLacksError, require
from nemo_rl_reshard.cli.stable_json import writable
from nemo_rl_reshard.errors import ConfigError, DeclarationError, LayoutError, PlanError, ReshardError

app = typer.Typer(
    name="nemo-rl-reshard",
    help="Plan, check, measure and compare refits that move trainer shards straight to inference shards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Exit(IntEnum):
    """What the command's exit code means."""

    GOOD = 0
    CHECK_FAILED = 1
    BAD_INPUT = 2
    ENVIRONMENT_LACKS = 3


SpecFile = Annotated[Path, typer.Argument(metavar="SPEC", help="A refit spec, YAML or JSON.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="OUT", help="Write the result as JSON.", callback=writable)
]
PictureFile = Annotated[Path | None, typer.Option("--plot", metavar="PNG", help="Draw a picture of the result.")]


@app.command()
def plan(
    spec: SpecFile,
    json: JsonFile = None,
    transfers: Annotated[bool, typer.Option("--transfers", help="Also list every transfer.")] = False,
    plot: PictureFile = None,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", metavar="LAYOUTS", help="Rank layouts instead: a file that lists them, or auto."),
    ] = None,
) -> None:
    """Plan a refit and say what moves where, how long it should take, and how near that is to the floor."""
    if plot is not None:
        require("matplotlib")
    if sweep is not None:
        from nemo_rl_reshard.cli.sweep import run_sweep

        run_sweep(spec, sweep, json, plot, Console())
        return
    from nemo_rl_reshard.cli.run_plan import run_plan

    run_plan(spec, json, Console(), with_transfers=transfers, picture=plot)


@app.command()
def simulate(spec: SpecFile, json: JsonFile = None, plot: PictureFile = None) -> None:
    """Simulate a refit by this plan beside three designs that are in use: how long each takes, and why."""
    if plot is not None:
        require("matplotlib")
    from nemo_rl_reshard.cli.run_simulate import run_simulate

    run_simulate(spec, json, plot, Console())


@app.command()
def verify(
    spec: SpecFile,
    processes: Annotated[bool, typer.Option("--processes", help="One process per rank, over gloo.")] = False,
    json: JsonFile = None,
) -> None:
    """Run the plan for real on this machine, twice, with values that tell every element from every other."""
    require("torch", "gloo")
    from nemo_rl_reshard.cli.run_verify import run_verify

    if not run_verify(spec, json, Console(), processes=processes):
        raise typer.Exit(Exit.CHECK_FAILED)


@app.command()
def bench(spec: SpecFile, json: JsonFile = None) -> None:
    """Time reshard, gather-and-broadcast and the line rate of the same transport, in one run of real processes."""
    require("torch", "gloo")
    from nemo_rl_reshard.cli.run_bench import run_bench

    run_bench(spec, json, Console())


@app.command()
def trace(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A checkpoint folder that vLLM can load.")],
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size of the engine.")] = 1,
    expert_parallel: Annotated[bool, typer.Option("--expert-parallel", help="Whole experts per rank.")] = False,
    json: JsonFile = None,
) -> None:
    """Start a real engine and print where its own loader puts each checkpoint tensor."""
    from nemo_rl_reshard.cli.run_trace import run_trace

    run_trace(model_dir, tp, json, Console(), expert_parallel=expert_parallel)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; ratios are to the first.")],
    plot: Annotated[Path, typer.Option("--plot", metavar="PNG", help="Where the picture goes.")] = Path(
        "refit_timings.png"
    ),
    json: JsonFile = None,
) -> None:
    """Compare the refits of training runs: one row per run, and a picture of their timings."""
    require("matplotlib")
    from nemo_rl_reshard.cli.compare import compare_runs
    from nemo_rl_reshard.cli.stable_json import write_json

    summaries = compare_runs(runs, plot, Console())
    if json is not None:
        write_json(json, {"schema": 1, "runs": summaries})


@app.command()
def doctor(
    required: Annotated[
        list[str] | None, typer.Option("--require", metavar="NAME", help="Exit with 3 if this is missing; repeatable.")
    ] = None,
    json: JsonFile = None,
    nemo_rl_rules: Annotated[
        bool, typer.Option("--nemo-rl-rules", help="Print what is refused under NeMo RL, as a table, and nothing else.")
    ] = False,
) -> None:
    """Say what this environment can do, what is missing, and how to get it."""
    from nemo_rl_reshard.cli.doctor import print_nemo_rl_rules, run_doctor

    if nemo_rl_rules:
        print_nemo_rl_rules(Console())
    else:
        run_doctor(required or [], json, Console())


def main() -> None:
    """Entry point of the console script: errors become one message on stderr and an exit code."""
    complaints = Console(stderr=True)
    try:
        app()
    except (ConfigError, LayoutError, DeclarationError, PlanError) as fault:
        complaints.print(str(fault), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(Exit.BAD_INPUT)
    except (EnvironmentLacksError, OSError) as fault:  # OSError: no room on the disk, no more processes or sockets
        complaints.print(str(fault), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(Exit.ENVIRONMENT_LACKS)
    except ReshardError as fault:
        complaints.print(f"{type(fault).__name__}: {fault}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(Exit.CHECK_FAILED)


if __name__ == "__main__":
    main()
