"""Published refit times as data: model, layout, machine, and where each of them is stated or why it is assumed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.topology import Topology, from_preset
from nemo_rl_reshard.virtual.megatron import megatron_source
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.vllm import vllm_target


class Design(StrEnum):
    """How the refit of a row was done."""

    GATHER_BROADCAST = "gather-and-broadcast"
    RESHARD = "reshard"


class Basis(StrEnum):
    """STATED: published with the figure. ASSUMED: taken from elsewhere, or guessed."""

    STATED = "stated"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Layout:
    """Megatron trainers and vLLM engines of a row, on which machine, with the basis of the GPU counts.

    `stages` are layers per pipeline stage; None for an even split.
    """

    machine: str
    trainers: int
    engines: int
    basis: Basis
    note: str
    source_tp: int = 1
    source_pp: int = 1
    source_ep: int = 1
    target_tp: int = 1
    target_dp: int = 1
    target_ep: int = 1
    stages: tuple[int, ...] | None = None

    def sides(self, model: ModelShape) -> tuple[Catalog, Catalog, Topology]:
        """What both sides hold and need of `model`, and where they sit. Raises ConfigError if a size does not fit."""
        source = megatron_source(
            model, world=self.trainers, tp=self.source_tp, pp=self.source_pp, ep=self.source_ep, stages=self.stages
        )
        target = vllm_target(
            model,
            world=self.engines,
            tp=self.target_tp,
            dp=self.target_dp,
            ep=self.target_ep,
            first_rank=self.trainers,
        )
        return source, target, from_preset(self.machine, [source.ranks, target.ranks])


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """One published time: a figure, or the range of several runs."""

    name: str
    design: Design
    model: str
    layout: Layout
    low_s: float
    high_s: float
    source: str

    @property
    def seconds(self) -> float:
        """The figure, or the middle of the range."""
        return (self.low_s + self.high_s) / 2


_ANNOUNCED = "NVIDIA's announcement of resharding in NeMo RL, 2026"
_DESIGN_DOC = "NeMo RL, docs/design-docs/nccl-reshard-refit.md, Expected Performance"
_PULL_2971 = "NeMo RL, pull request 2971, Python transport"

_QWEN3_235B = Layout(
    "dgx-h100", 128, 128, Basis.ASSUMED,
    "the recipe grpo-qwen3-235b-32n8g-async-1off; nothing is stated with the figure",
    source_tp=4, source_pp=8, source_ep=16, target_tp=8, target_dp=16, stages=(11, *[12] * 6, 11),
)  # fmt: skip
_DEEPSEEK_H100 = Layout(
    "dgx-h100", 256, 256, Basis.STATED,
    "PP16 x EP16 -> TP32 x DP8 in the design document; layers by stage as in the recipe for 64 hosts",
    source_pp=16, source_ep=16, target_tp=32, target_dp=8, stages=(3, *[4] * 14, 2),
)  # fmt: skip
_DEEPSEEK_GB200 = Layout(
    "gb200-nvl72", 256, 256, Basis.STATED,
    "PP16 x EP16 -> TP32 x DP8 in the design document; 64 GPUs used of every NVL72 domain is assumed",
    source_pp=16, source_ep=16, target_tp=32, target_dp=8, stages=(3, *[4] * 14, 2),
)  # fmt: skip
_ULTRA_GB200 = Layout(
    "gb200-nvl72", 64, 64, Basis.ASSUMED,
    "TP8 x EP32 x PP2 -> TP8 x DP8 in the design document; 64 is the least number of trainers that it allows",
    source_tp=8, source_pp=2, source_ep=32, target_tp=8, target_dp=8,
)  # fmt: skip
_QWEN_2400B = Layout(
    "gb200-nvl72", 512, 512, Basis.ASSUMED,
    "nothing is published: DeepSeek-V3's with twice the ranks on both sides, for 3.6 times the bytes; engine groups of "
    "64 by TP16 x EP64, since the stand-in's linear attention has 16 key heads",
    source_pp=16, source_ep=32, target_tp=16, target_dp=32, target_ep=64,
    stages=(*[6] * 12, *[5] * 4),
)  # fmt: skip
_QWEN35_397B = Layout(
    "dgx-h100", 256, 256, Basis.ASSUMED,
    "TP8 x PP8 x EP32 -> TP16 x DP16 in the design document; 256 is the least number of trainers that it allows",
    source_tp=8, source_pp=8, source_ep=32, target_tp=16, target_dp=16, stages=(6, *[8] * 6, 6),
)  # fmt: skip
_QWEN3_30B = Layout(
    "dgx-h100", 16, 16, Basis.STATED,
    "EP8 x PP2 -> TP8 x DP2 in the design document, 16 + 16 GPUs in pull request 2971",
    source_pp=2, source_ep=8, target_tp=8, target_dp=2,
)  # fmt: skip

_GATHER, _RESHARD = Design.GATHER_BROADCAST, Design.RESHARD
ROWS: tuple[PublishedRow, ...] = (
    PublishedRow("Qwen3-235B, H100", _GATHER, "qwen3-235b-a22b", _QWEN3_235B, 6.4, 6.4, _ANNOUNCED),
    PublishedRow("DeepSeek-V3, H100", _GATHER, "deepseek-v3", _DEEPSEEK_H100, 14.9, 14.9, _ANNOUNCED),
    PublishedRow("DeepSeek-V3, GB200", _GATHER, "deepseek-v3", _DEEPSEEK_GB200, 6.1, 6.1, _ANNOUNCED),
    PublishedRow("Nemotron Ultra, GB200", _GATHER, "nemotron-ultra-550b", _ULTRA_GB200, 8.2, 8.2, _ANNOUNCED),
    PublishedRow("Qwen3-235B, H100", _RESHARD, "qwen3-235b-a22b", _QWEN3_235B, 1.9, 1.9, _ANNOUNCED),
    PublishedRow("DeepSeek-V3, H100", _RESHARD, "deepseek-v3", _DEEPSEEK_H100, 2.6, 2.6, _ANNOUNCED),
    PublishedRow("DeepSeek-V3, GB200", _RESHARD, "deepseek-v3", _DEEPSEEK_GB200, 2.3, 2.3, _ANNOUNCED),
    PublishedRow("Nemotron Ultra, GB200", _RESHARD, "nemotron-ultra-550b", _ULTRA_GB200, 2.3, 2.3, _ANNOUNCED),
    PublishedRow("Qwen3.8-2.4T, GB200", _RESHARD, "qwen3.8-2.4t", _QWEN_2400B, 4.3, 4.3, _ANNOUNCED),
    PublishedRow("Qwen3-30B-A3B, H100", _RESHARD, "qwen3-30b-a3b", _QWEN3_30B, 0.74, 1.00, _DESIGN_DOC),
    PublishedRow("Qwen3.5-397B, H100", _RESHARD, "qwen3.5-397b", _QWEN35_397B, 1.97, 2.17, _DESIGN_DOC),
)
"""The rows that the simulator answers for. Only a row that states at least one side's layout can teach it anything:
`FITTED_ROWS` leaves out the 2.4T one, whose machine and layout are guesses."""

FITTED_ROWS: tuple[PublishedRow, ...] = tuple(row for row in ROWS if row.model != "qwen3.8-2.4t")


def _h100(trainers: int, engines: int, note: str, **sizes: int) -> Layout:
    return Layout("dgx-h100", trainers, engines, Basis.STATED, note, **sizes)  # type: ignore[arg-type]


_16_16 = "16 + 16 GPUs in the pull request"
CHECKS: tuple[PublishedRow, ...] = (
    PublishedRow(
        "DeepSeek-V3 to one engine, H100", _GATHER, "deepseek-v3",
        Layout("dgx-h100", 256, 32, Basis.STATED, "36 hosts", source_pp=16, source_ep=16, target_tp=32,
               stages=(3, *[4] * 14, 2)),
        14.21, 14.21, "NeMo RL, docs/guides/checkpoint-engine-refit.md, NCCL broadcast, asynchronous engine",
    ),
    PublishedRow(
        "Qwen3-4B, H100", _RESHARD, "qwen3-4b", _h100(8, 8, "DP8 -> TP8", target_tp=8), 0.21, 0.34, _DESIGN_DOC,
    ),
    PublishedRow(
        "Qwen3-30B-A3B, EP4 x TP2 x PP2 to TP4", _RESHARD, "qwen3-30b-a3b",
        _h100(16, 16, _16_16, source_tp=2, source_pp=2, source_ep=4, target_tp=4, target_dp=4), 0.74, 1.17, _PULL_2971,
    ),
    PublishedRow(
        "Qwen3-30B-A3B, EP8 x PP2 to TP2", _RESHARD, "qwen3-30b-a3b",
        _h100(16, 16, _16_16, source_pp=2, source_ep=8, target_tp=2, target_dp=8), 1.21, 1.52, _PULL_2971,
    ),
    PublishedRow(
        "Qwen3-30B-A3B, EP4 x TP2 x DP2 to TP4", _RESHARD, "qwen3-30b-a3b",
        _h100(16, 16, _16_16, source_tp=2, source_ep=4, target_tp=4, target_dp=4), 1.13, 1.53, _PULL_2971,
    ),
)  # fmt: skip
"""Rows that the fit never sees: how far the simulator carries beyond what it was fitted on."""
