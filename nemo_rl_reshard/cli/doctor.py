"""`doctor`: what this environment can do, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemo_rl_reshard import __version__
from nemo_rl_reshard.cli.requirements import PROBES, Finding, require
from nemo_rl_reshard.cli.spec_fields import nearest
from nemo_rl_reshard.cli.stable_json import write_json
from nemo_rl_reshard.errors import ConfigError, FaultList

_ABILITIES = (
    ("plan a refit (plan)", ()),
    ("check and time one on this machine (verify, bench)", ("torch", "gloo")),
    ("trace an engine's loader (trace)", ("torch", "vllm")),
    (
        "train the GRPO example",
        ("torch", "gloo", "vllm", "ray", "pydantic", "omegaconf", "transformers", "tensorboard"),
    ),
    ("draw comparisons (compare)", ("matplotlib",)),
    ("refit inside NeMo RL (attach)", ("torch", "gloo", "ray", "pydantic", "nemo-rl")),
    ("refit over NCCL between GPUs (transport)", ("torch", "cuda", "nccl")),
)


def run_doctor(required: Sequence[str], json_file: Path | None, console: Console) -> None:
    """Print the findings, write JSON if asked.

    Raises ConfigError for names that are not known, then EnvironmentLacksError if something required is missing.
    """
    faults = FaultList("--require", ConfigError)
    faults.extend(f"unknown name {name!r}; {nearest(name, PROBES)}" for name in required if name not in PROBES)
    faults.raise_if_any()
    findings = {name: probe() for name, probe in PROBES.items()}
    abilities = {label: [name for name in names if not findings[name].present] for label, names in _ABILITIES}
    if json_file is not None:
        plain = {
            "schema": 1,
            "version": __version__,
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "findings": [finding.to_plain() for finding in findings.values()],
            "abilities": [{"what": what, "lacks": lacks} for what, lacks in abilities.items()],
        }
        write_json(json_file, plain)
    console.print(
        f"nemo-rl-reshard {__version__}, Python {platform.python_version()} at {sys.prefix}, "
        f"{len(os.sched_getaffinity(0))} cores",
        soft_wrap=True,
        highlight=False,
    )
    console.print(_found(list(findings.values())))
    for what, lacks in abilities.items():
        state = "[green]can[/green]   " if not lacks else "[yellow]cannot[/yellow]"
        console.print(f"{state} {what}" + (f": lacks {', '.join(lacks)}" if lacks else ""), highlight=False)
    require(*required)


def print_nemo_rl_rules(console: Console) -> None:
    """Print the table of docs/nemo-rl-compatibility.md. Raises EnvironmentLacksError without the extra driver."""
    require("pydantic")
    from nemo_rl_reshard.integrations.nemo_rl.compatibility import table

    console.print(table(), markup=False, highlight=False, soft_wrap=True)


def _found(findings: Sequence[Finding]) -> Table:
    table = Table(header_style="bold")
    table.add_column("what", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("for", overflow="fold")
    table.add_column("remarks", overflow="fold")
    for finding in findings:
        here = f"[green]{finding.version or 'yes'}[/green]" if finding.present else "[yellow]missing[/yellow]"
        remarks = [finding.note, "" if finding.present else finding.remedy]
        table.add_row(finding.name, here, finding.serves, "; ".join(remark for remark in remarks if remark))
    return table
