"""Read the folders that `compare` is given, whichever launcher wrote them, and agree on one measure for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nemo_rl_reshard.cli import metrics_file, nemo_rl_log
from nemo_rl_reshard.cli.run_records import MEASURES, RunRecord
from nemo_rl_reshard.errors import ConfigError, FaultList


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run folders: `metrics.jsonl` where there is one, else NeMo RL's TensorBoard events.

    All records get the same `measure`. Raises one ConfigError listing every folder, line and key that is missing or
    malformed, or saying that the runs have no measure in common.
    """
    faults = FaultList("reading runs", ConfigError)
    found = [_read(path, faults) for path in paths]
    faults.raise_if_any()
    records = [record for record in found if record is not None]
    common = [measure for measure in MEASURES if all(measure in record.measures for record in records)]
    if not common:
        faults.extend(f"{record.path}: times its refits as {', '.join(record.measures)} alone" for record in records)
        faults.add("no measure is in all runs, so there is nothing to compare them by")
    faults.raise_if_any()
    return [replace(record, measure=common[0]) for record in records]


def _read(path: Path, faults: FaultList) -> RunRecord | None:
    events = nemo_rl_log.events_folder(path)
    # Both are there when the CPU loop wrote the run: its own file has more.
    if (path / metrics_file.NAME).exists() or events is None:
        return metrics_file.read_metrics(path, faults)
    return nemo_rl_log.read_log(path, events, faults)
