"""Which transport a refit world uses: decided once, by the driver, from what every rank declared of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_reshard.config import TransportKind
from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.transport.devices import DeviceReport


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """`kind` is never "auto"; `reason` says why it is what it is."""

    kind: TransportKind
    reason: str


def choose_transport(
    asked: TransportKind, reports: Mapping[int, DeviceReport], hosts: Mapping[int, str], names: Mapping[int, str]
) -> TransportChoice:
    """The transport of a world whose rank `r` reported `reports[r]`, runs on `hosts[r]` and is called `names[r]`.

    "auto" takes NCCL where every rank has its weights on a GPU of its own and could join, else gloo. Raises
    ConfigError naming every rank that cannot if NCCL was asked for.
    """
    if asked is TransportKind.GLOO:
        return TransportChoice(TransportKind.GLOO, "as configured")
    obstacles = [f"{names[rank]}: {report.obstacle}" for rank, report in sorted(reports.items()) if report.obstacle]
    obstacles += [*_shared_gpus(reports, hosts, names), *_different_versions(reports, names)]
    if asked is TransportKind.NCCL:
        faults = FaultList("transport: nccl cannot be used; configure auto or gloo", ConfigError)
        faults.extend(obstacles)
        faults.raise_if_any()
        return TransportChoice(TransportKind.NCCL, "as configured")
    elsewhere = [names[rank] for rank, report in sorted(reports.items()) if report.weights not in ("cuda", "none")]
    if elsewhere:
        return TransportChoice(TransportKind.GLOO, f"weights are not on a GPU: {', '.join(elsewhere)}")
    if obstacles:
        return TransportChoice(TransportKind.GLOO, f"NCCL cannot be used: {'; '.join(obstacles)}")
    return TransportChoice(TransportKind.NCCL, "every rank has a GPU of its own")


def _shared_gpus(reports: Mapping[int, DeviceReport], hosts: Mapping[int, str], names: Mapping[int, str]) -> list[str]:
    """NCCL refuses two members on one GPU."""
    owners: dict[tuple[str, str], list[str]] = {}
    for rank, report in sorted(reports.items()):
        if report.accelerator:
            owners.setdefault((hosts[rank], report.accelerator), []).append(names[rank])
    return [
        f"{', '.join(ranks)}: share GPU {accelerator} of {host}"
        for (host, accelerator), ranks in owners.items()
        if len(ranks) > 1
    ]


def _different_versions(reports: Mapping[int, DeviceReport], names: Mapping[int, str]) -> list[str]:
    """NCCL refuses members of other versions than its own."""
    versions = {rank: report.nccl for rank, report in reports.items() if not report.obstacle}
    return _differences("their NCCL is", versions, names)


def _differences(what: str, values: Mapping[int, str], names: Mapping[int, str]) -> list[str]:
    """One sentence if `values` are not all equal: who has which."""
    ranks_by_value: dict[str, list[str]] = {}
    for rank, value in sorted(values.items()):
        ranks_by_value.setdefault(value, []).append(names[rank])
    if len(ranks_by_value) < 2:
        return []
    return [f"{what} " + "; ".join(f"{value} on {', '.join(ranks)}" for value, ranks in ranks_by_value.items())]
