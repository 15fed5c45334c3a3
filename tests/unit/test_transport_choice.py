"""Which transport a refit world uses, and who keeps it from NCCL. B74."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from nemo_rl_reshard.config import RefitConfig, TransportKind
from nemo_rl_reshard.errors import ConfigError, DeclarationError
from nemo_rl_reshard.orchestration.transport_choice import TransportChoice, choose_transport
from nemo_rl_reshard.transport.devices import DeviceReport

ON_GPU = DeviceReport("cuda", "cuda:0", "GPU-a", nccl="2.28.9")
ON_CPU = DeviceReport("cpu", obstacle="there is no CUDA device")


def choose(asked: str, *reports: DeviceReport, hosts: tuple[str, ...] | None = None) -> TransportChoice:
    ranks = range(len(reports))
    return choose_transport(
        TransportKind(asked),
        dict(enumerate(reports)),
        dict(zip(ranks, hosts or ["node"] * len(reports), strict=True)),
        {rank: f"rank {rank}" for rank in ranks},
    )


def gpus(count: int) -> list[DeviceReport]:
    return [replace(ON_GPU, accelerator=f"GPU-{index}") for index in range(count)]


def test_the_key_is_part_of_the_refit_section() -> None:
    assert RefitConfig.read({}).transport is TransportKind.AUTO
    assert RefitConfig.read({"transport": "nccl"}).transport is TransportKind.NCCL
    with pytest.raises(ConfigError, match="transport: input should be 'auto', 'gloo' or 'nccl', got 'ncll'"):
        RefitConfig.read({"transport": "ncll"})


def test_auto_takes_nccl_where_every_rank_has_a_gpu_of_its_own() -> None:
    assert choose("auto", *gpus(3)).kind is TransportKind.NCCL
    # The same name of a device means nothing across processes, and the same GPU is another one on another host.
    assert choose("auto", ON_GPU, ON_GPU, hosts=("one", "other")).kind is TransportKind.NCCL
    assert choose("auto", *gpus(2), replace(ON_GPU, weights="none", accelerator="GPU-9")).kind is TransportKind.NCCL


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (ON_CPU, "weights are not on a GPU: rank 2"),
        (replace(ON_GPU, weights="cpu", accelerator="GPU-9"), "weights are not on a GPU: rank 2"),
        (replace(ON_GPU, weights="mixed", accelerator="GPU-9"), "weights are not on a GPU: rank 2"),
        (replace(ON_GPU, accelerator="GPU-1"), "rank 1, rank 2: share GPU GPU-1 of node"),
        (replace(ON_GPU, accelerator="GPU-9", nccl="2.27.5"), "2.27.5 on rank 2"),
        (DeviceReport("cuda", obstacle="its torch is built without NCCL"), "rank 2: its torch is built without NCCL"),
    ],
)
def test_auto_falls_back_to_gloo_and_says_why(odd: DeviceReport, reason: str) -> None:
    choice = choose("auto", *gpus(2), odd)
    assert choice.kind is TransportKind.GLOO
    assert reason in choice.reason


def test_gloo_is_taken_unasked() -> None:
    assert choose("gloo", *gpus(2)) == TransportChoice(TransportKind.GLOO, "as configured")
    assert choose("gloo", ON_CPU, ON_CPU).kind is TransportKind.GLOO


def test_b74_asking_for_nccl_names_every_rank_that_cannot() -> None:
    reports = [*gpus(2), ON_CPU, replace(ON_GPU, accelerator="GPU-0"), replace(ON_GPU, nccl="2.27.5"), ON_CPU]
    with pytest.raises(ConfigError) as refused:
        choose("nccl", *reports)
    text = str(refused.value)
    assert "4 faults" in text
    for needle in (
        "rank 2: there is no CUDA device",
        "rank 5: there is no CUDA device",
        "rank 0, rank 3: share GPU GPU-0 of node",
        "their NCCL is 2.28.9 on rank 0, rank 1, rank 3; 2.27.5 on rank 4",
    ):
        assert needle in text


def test_offloaded_weights_may_travel_over_nccl_when_it_is_asked_for() -> None:
    assert choose("nccl", *gpus(2), replace(ON_GPU, weights="cpu", accelerator="GPU-9")).kind is TransportKind.NCCL


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a rank without a GPU declares")
def test_a_rank_without_a_gpu_says_so() -> None:
    assert DeviceReport.of([torch.device("cpu")]) == ON_CPU
    assert DeviceReport.of([]).weights == "none"
    mixed = DeviceReport.of([torch.device("cpu"), torch.device("cuda:0")])
    assert (mixed.weights, mixed.obstacle) == ("mixed", "there is no CUDA device")
    assert DeviceReport.of([torch.device("meta")]).obstacle == "its weights lie on meta"


def test_b70_a_report_survives_json() -> None:
    plain = json.loads(json.dumps(ON_GPU.to_plain()))
    assert DeviceReport.from_plain(plain) == ON_GPU
    with pytest.raises(DeclarationError, match="malformed device report"):
        DeviceReport.from_plain({"weights": "cpu", "size": 3})
