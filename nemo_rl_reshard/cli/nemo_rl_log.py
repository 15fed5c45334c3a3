"""Read the folder that NeMo RL logs a run to: TensorBoard events under its own keys, refits of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from nemo_rl_reshard.cli.requirements import require
from nemo_rl_reshard.cli.run_records import MEASURES, SECONDS, RunRecord
from nemo_rl_reshard.errors import FaultList

EVENTS = "events.out.tfevents.*"
_RENAMED = {"train/reward": "reward/mean"}
"""NeMo RL's names of what the CPU loop logs too."""
_KEPT = ("refit/", "train/token_mult_prob_error", *MEASURES)
_HYPERPARAMETERS = "_hparams_/session_start_info"


def events_folder(run: Path) -> Path | None:
    """Where a run of NeMo RL keeps its TensorBoard events: in `tensorboard`, or in the folder itself; else None."""
    for folder in (run / "tensorboard", run):
        if any(folder.glob(EVENTS)):
            return folder
    return None


def read_log(run: Path, events: Path, faults: FaultList) -> RunRecord | None:
    """The run whose events are in `events`, or None after adding to `faults` why it cannot be compared.

    Raises EnvironmentLacksError without the package tensorboard.
    """
    require("tensorboard")
    steps = _steps(events, faults)
    if steps is None:
        return None
    backend, note = _backend(_hyperparameters(events), measured=any(SECONDS in step for step in steps))
    record = RunRecord(run, backend, tuple(steps), note=note)
    if not record.measures:
        faults.add(f"{events}: has no seconds of any refit: looked for {', '.join(MEASURES)}")
        return None
    return record


def _steps(events: Path, faults: FaultList) -> list[Mapping[str, Any]] | None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 keeps every point; the default draws a sample.
    log = EventAccumulator(str(events), size_guidance={"scalars": 0})
    log.Reload()
    before = len(faults)
    by_step: dict[int, dict[str, Any]] = {}
    for tag in log.Tags()["scalars"]:
        key = _RENAMED.get(tag, tag)
        if tag in _RENAMED or tag.startswith(_KEPT):
            for point in log.Scalars(tag):
                if not isfinite(point.value):
                    faults.add(f"{events}, step {point.step}: no finite number: {tag} {point.value}")
                # A run that resumed logs some steps again; the later point is the run's.
                by_step.setdefault(point.step, {"step": point.step})[key] = point.value
    if len(faults) > before:
        return None
    return [by_step[step] for step in sorted(by_step)]


def _hyperparameters(events: Path) -> dict[str, Any]:
    """NeMo RL's configuration by dotted keys, as it gives it to TensorBoard; empty if it did not."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found: dict[str, Any] = {}
    for folder in sorted({path.parent for path in events.glob(f"*/{EVENTS}")}):
        log = EventAccumulator(str(folder))
        log.Reload()
        if _HYPERPARAMETERS in log.PluginTagToContent("hparams"):
            content = HParamsPluginData.FromString(log.PluginTagToContent("hparams")[_HYPERPARAMETERS])
            for key, value in content.session_start_info.hparams.items():
                found[key] = getattr(value, value.WhichOneof("kind") or "", None)
    return found


def _backend(hyperparameters: Mapping[str, Any], *, measured: bool) -> tuple[str, str]:
    """The refit backend by what was measured, not by what was asked for, and a remark where the two differ."""
    asked = hyperparameters.get("refit.backend")
    if measured:
        return str(asked or "nemo_rl_reshard"), ""
    transport = hyperparameters.get("policy.generation.refit_transport")
    name = "nemo_rl" if transport is None else f"nemo_rl ({transport})"
    if asked in (None, "nemo_rl"):
        return name, ""
    return name, (
        f"the run asked for refit.backend {asked}, and logged no refit of it: it was not attached (docs/nemo-rl.md has "
        "the two lines), or it fell back to NeMo RL's own"
    )
