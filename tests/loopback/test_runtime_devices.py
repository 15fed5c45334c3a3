"""Weights on another device than the transport's bytes: what is staged, and what is complete before it is used. B69.

There is no GPU here: tensors that lie on the CPU and say that they lie on a GPU show what would be done with them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equipment.refit_worlds import MLP, mesh_layout, planned_ranks

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime import lane
from nemo_rl_reshard.runtime.explicit import ExplicitSource, ExplicitTarget
from nemo_rl_reshard.runtime.mover import MessageMover
from nemo_rl_reshard.runtime.order import VerifyMode
from nemo_rl_reshard.runtime.report import RankReport
from nemo_rl_reshard.runtime.verify import Verification
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.staging import StagingSlots
from nemo_rl_reshard.transport.streams import StreamOrder

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


def on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu) if device == GPU else tensor


class Notes(StreamOrder):
    """Keeps a log of what is waited for."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(cuda=None)
        self._log = log

    def meet(self, device: torch.device) -> None:
        if device == GPU and "meet" not in self._log:
            self._log.append("meet")

    def settle(self, deadline: Deadline, what: str) -> None:
        self._log.append("settle")


class Done:
    def wait(self, deadline: Deadline) -> None:
        pass


class LoggingTransport:
    """Notes what is started; `landing` is what arrives."""

    in_rounds = False
    size = 2

    def __init__(self, rank: int, device: torch.device, log: list[str], arriving: torch.Tensor) -> None:
        self.rank, self.device, self._log, self._arriving = rank, device, log, arriving
        self.sent: list[torch.Tensor] = []

    def send(self, buffer: torch.Tensor, dst: int) -> Done:
        self._log.append("send")
        self.sent.append(buffer.clone())
        return Done()

    def receive(self, buffer: torch.Tensor, src: int) -> Done:
        self._log.append("receive")
        buffer.copy_(self._arriving[: buffer.numel()])
        return Done()


class LoggingSlots(StagingSlots):
    """Slots that remember how they were made; nothing is on a GPU, and nothing can be pinned."""

    made: list[tuple[torch.device, bool]] = []  # noqa: RUF012

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device, *, pinned: bool = False) -> None:
        self.made.append((device, pinned))
        super().__init__(num_slots, slot_bytes, "cpu")
        if device == GPU:
            self._memory = on(GPU, self._memory)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, bool]]:
    monkeypatch.setattr(lane, "StagingSlots", LoggingSlots)
    monkeypatch.setattr(LoggingSlots, "made", [])
    return LoggingSlots.made


def two_ranks(*, strided: bool) -> tuple[ExplicitRank, ...]:
    """A trainer and an engine of one tensor in one message."""
    placement = "S(1)" if strided else "R"
    return planned_ranks(
        [(MLP, mesh_layout((2, 4), (1,), [0], "R"), "float32")],
        [(MLP, mesh_layout((2, 4), (1,), [1], placement), "float32")],
        num_trainers=1,
        num_targets=1,
        options=PlanOptions(),
    )


VALUES = torch.arange(8.0).view(2, 4)


def mover_of(rank: int, weights: torch.Tensor, transport: Any, log: list[str]) -> MessageMover:
    made_of = two_ranks(strided=False)[rank]
    ((region,),) = (made_of.holds or made_of.needs).values()
    shards = {MLP: [(region, weights)]}
    source = ExplicitSource(made_of.source_specs, shards) if rank == 0 else None
    target = ExplicitTarget(made_of.target_specs, shards) if rank == 1 else None
    mover = MessageMover(
        made_of.assignment.program,
        transport,
        Notes(log),
        source=source,
        target=target,
        held={MLP: [region]} if rank == 0 else {},
        in_flight=4,
        bucket_bytes=64,
    )
    mover.begin()
    return mover


def send(weights: torch.Tensor, device: torch.device) -> tuple[list[str], torch.Tensor, RankReport]:
    log: list[str] = []
    transport = LoggingTransport(0, device, log, torch.empty(0))
    mover = mover_of(0, weights, transport, log)
    report = RankReport(0, 1)
    verification = Verification(VerifyMode.OFF, 1, 0, transport)
    (step,) = mover.steps.outgoing
    flight = mover.ready_send(step, Deadline.after(5.0), report, verification)
    mover.start(flight, report)
    mover.finish_send(Deadline.after(5.0), report)
    return log, transport.sent[0], report


def receive(weights: torch.Tensor, device: torch.device) -> tuple[list[str], RankReport]:
    log: list[str] = []
    transport = LoggingTransport(1, device, log, VALUES.view(-1).view(torch.uint8))
    mover = mover_of(1, weights, transport, log)
    report = RankReport(1, 1)
    verification = Verification(VerifyMode.OFF, 1, 0, transport)
    (message,) = mover.steps.incoming
    mover.start(mover.ready_receive(message, report, verification), report)
    mover.finish_receive(Deadline.after(5.0), report, verification)
    return log, report


def test_b69_weights_on_a_gpu_are_on_the_host_before_gloo_sends_them(made):
    log, sent, report = send(on(GPU, VALUES.clone()), CPU)
    assert log == ["meet", "settle", "send"]
    assert torch.equal(sent.view(torch.float32).view(2, 4), VALUES)
    assert made == [(CPU, True)], "staged in pinned host memory"
    assert report.num_zero_copy == 0


def test_b69_weights_on_a_gpu_are_complete_before_their_slot_is_used_again(made):
    weights = on(GPU, torch.zeros(2, 4))
    log, report = receive(weights, CPU)
    assert log == ["meet", "receive", "settle"]
    assert torch.equal(torch.Tensor(weights), VALUES)
    assert made == [(CPU, True)]
    assert report.num_zero_copy == 0


def test_weights_on_the_transports_device_travel_in_place(made):
    for device in (CPU, GPU):
        log, _, report = send(on(device, VALUES.clone()), device)
        assert log == (["meet"] if device == GPU else []) + ["send"]
        assert report.num_zero_copy == 1
        log, report = receive(on(device, torch.zeros(2, 4)), device)
        assert log == (["meet"] if device == GPU else []) + ["receive"]
        assert report.num_zero_copy == 1
    assert made == []


def test_strided_weights_are_packed_on_the_transports_device(made):
    strided = torch.zeros(4, 2)
    strided.t().copy_(VALUES)
    log, sent, _ = send(on(GPU, strided).t(), GPU)
    assert log == ["meet", "send"], "streams keep the order; the host waits for nothing"
    assert torch.equal(torch.Tensor(sent).view(torch.float32).view(2, 4), VALUES)
    assert made == [(GPU, False)]


def test_offloaded_weights_reach_nccl_through_pinned_memory_message_by_message(made, monkeypatch):
    twins: list[int] = []
    host_twin = StagingSlots.host_twin

    def noting(self: StagingSlots, slot: int, nbytes: int) -> torch.Tensor:
        twins.append(nbytes)
        return host_twin(self, slot, nbytes)

    monkeypatch.setattr(StagingSlots, "host_twin", noting)
    log, sent, report = send(VALUES.clone(), GPU)
    assert log == ["send"]
    assert twins == [32], "the message's bytes and no more"
    assert torch.equal(torch.Tensor(sent).view(torch.float32).view(2, 4), VALUES)
    assert made == [(GPU, False)]
    assert report.num_zero_copy == 0
