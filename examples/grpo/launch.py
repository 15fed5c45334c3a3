"""The CPU loop from start to end: model, Ray, trainers, engines, one run per backend, comparison."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from grpo.actors import Cast, start
from grpo.config import load_config, refit_section
from grpo.loop import Metrics, train
from grpo.model import write_checkpoint
from grpo.run_folder import RunFolder
from nemo_rl_reshard.cli.compare import compare_runs
from nemo_rl_reshard.config import Backend
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.orchestration.cpu_environment import CpuEnvironment

EXAMPLES = Path(__file__).resolve().parents[1]


def launch(path: Path, overrides: Sequence[str], console: Console) -> None:
    """Run the configuration file `path`. Raises ConfigError for a faulty one, RefitError if a refit failed."""
    config = load_config(path, overrides)
    with tempfile.TemporaryDirectory(prefix="grpo-checkpoint-") as folder:
        _run(Path(folder), config, console)


def _run(checkpoint: Path, config: dict[str, Any], console: Console) -> None:
    """Build the model, start everyone, train with each backend, compare."""
    start_s = time.perf_counter()
    num_parameters = write_checkpoint(checkpoint, config["model"], config["seed"])
    ray.init(
        num_cpus=config["cluster"]["num_cpus"],
        include_dashboard=False,
        runtime_env={"env_vars": _worker_environment(config)},
        log_to_driver=config["cluster"]["show_worker_output"],
        logging_level="error",
    )
    try:
        sizes, policy = config["generation"]["engines"], config["policy"]
        console.print(
            f"Qwen3 of {num_parameters / 1e6:.1f} M parameters; {policy['dp'] * policy['tp']} trainers "
            f"(FSDP2 dp{policy['dp']} x tp{policy['tp']}), engines {', '.join(f'TP{size}' for size in sizes)}"
        )
        with console.status("starting trainers and engines ..."):
            cast = start(checkpoint, config)
        console.print(f"all ready after {time.perf_counter() - start_s:.0f} s")
        folders = _train_each(cast, config, console)
    finally:
        ray.shutdown()
    together = folders[0] if len(folders) == 1 else folders[0].parent
    compare_runs(folders, together / "refit_timings.png", console)
    console.print(f"total {time.perf_counter() - start_s:.0f} s")


def _worker_environment(config: dict[str, Any]) -> dict[str, str]:
    """What actors find in their environment: vLLM's CPU settings, this folder and the CPU engine plugin to import."""
    settings = CpuEnvironment(
        kv_cache_gib=config["generation"]["kv_cache_gib"], python_path=(EXAMPLES, EXAMPLES / "cpu_engine")
    )
    return settings.variables() | {"CPU_ENGINE_LIVE_WEIGHTS": str(int(config["generation"]["live_weights"]))}


def _train_each(cast: Cast, config: dict[str, Any], console: Console) -> list[Path]:
    """One training run per backend; returns their folders."""
    backends = [Backend(name) for name in config["refit"]["backend"]]
    controller = RefitController(*cast.members(), refit_section(config, backends[0]))
    folders = []
    for backend in backends:
        path = RunFolder.choose(config["logger"]["run_dir"], str(backend), len(backends))
        resolved = {**config, "refit": {**config["refit"], "backend": str(backend)}}
        with RunFolder(path, resolved) as folder, _progress(console) as progress:
            console.print(f"\n[bold]{backend}[/bold] into {path}")
            task = progress.add_task("", total=config["grpo"]["num_steps"], now="planning the refit")
            folder.plan(controller.plan(backend).summary)
            train(cast, controller, config, backend, folder, _reporter(progress, task, console))
        folders.append(path)
    controller.close()
    return folders


def _reporter(progress: Progress, task: TaskID, console: Console) -> Callable[[Metrics], None]:
    """Shows each step as it is done: in the progress bar on a terminal, as a line of its own elsewhere."""

    def report(metrics: Metrics) -> None:
        progress.update(task, advance=1, now=_line(metrics))
        if not console.is_terminal:
            console.print(f"  step {metrics['step']:3d}  {metrics['time_s']:5.1f} s  {_line(metrics)}", highlight=False)

    return report


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), BarColumn(bar_width=16), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[now]}"), console=console, disable=not console.is_terminal)


def _line(metrics: Metrics) -> str:
    """What the progress bar says about the last step."""
    refit_s = metrics["refit/seconds"]
    refit = "left out" if refit_s is None else f"{refit_s:.2f} s"
    return f"reward {metrics['reward/mean']:.2f}  refit {refit}  gap {metrics['logprob_gap/mean_abs']:.0e}"
