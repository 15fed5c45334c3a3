"""The NCCL transport over simulated NCCL groups: whole refits, failures that wake ranks in NCCL's waits, the watchdog.

torch's own groups need GPUs; everything above them is what runs there. B60 B61 B68.
"""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from equipment.refit_worlds import ThreadWorld, mixed_ranks
from equipment.simulated_nccl import BackendWithoutGpu, SimulatedNccl
from equipment.thread_worlds import run_ranks

from nemo_rl_reshard.errors import RefitAbortedError, TargetError, TransportError, TransportTimeoutError
from nemo_rl_reshard.transport import nccl_backend, process_group
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.nccl_backend import NcclBackend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nccl(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimulatedNccl, raising=False)
    monkeypatch.setattr(process_group, "make_backend", lambda name, host, device: BackendWithoutGpu(device))
    SimulatedNccl.made_with.clear()


def test_two_refits_and_a_new_generation():
    with ThreadWorld(mixed_ranks(in_rounds=True), over="nccl") as world:
        for version in (1, 2):
            reports = world.refit(version)
        assert all(report["num_verified"] for rank, report in reports.items() if rank >= 2)
        world.rebuild()
        world.refit(3)


def test_a_failing_rank_wakes_all_and_the_next_generation_is_right_b61():
    with ThreadWorld(mixed_ranks(in_rounds=True), over="nccl") as world:
        world.refit(1)
        target = world.live[3].target
        done = target.tensor_done

        def fails(_tensor):
            raise TargetError("no memory for the layer")

        target.tensor_done = fails
        start_s = time.monotonic()
        outcomes = world.outcomes(2)
        assert time.monotonic() - start_s < 8.0, "long before the deadline"
        assert isinstance(outcomes[3], TargetError)
        others = [outcome for rank, outcome in outcomes.items() if rank != 3]
        assert all(isinstance(outcome, RefitAbortedError) for outcome in others), outcomes
        target.tensor_done = done
        world.rebuild()
        world.refit(3)


def test_a_rank_that_stays_away_is_a_timeout_for_the_others():
    with ThreadWorld(mixed_ranks(in_rounds=True), over="nccl") as world:
        world.refit(1)
        order = {"version": 2, "verify": "off", "deadline_s": 0.5, "seed": 2}
        present = [session for rank, session in world.sessions.items() if rank != 4]
        outcomes = run_ranks([partial(session.refit, order) for session in present])
        assert any(isinstance(outcome, TransportTimeoutError) for outcome in outcomes)
        assert all(isinstance(outcome, TransportError) for outcome in outcomes)


def test_a_rank_blocked_at_the_first_message_of_a_pair_is_woken_by_its_own_time():
    """Connecting a pair blocks the host inside NCCL, where no deadline is looked at."""
    with ThreadWorld(mixed_ranks(in_rounds=True), over="nccl") as world:
        transports = [session._joined.seat.transport for session in world.sessions.values()]
        transports[0]._timeout_s = 0.3
        with pytest.raises(TransportTimeoutError, match=r"connecting for send to rank 2 passed its deadline of 0\.3 s"):
            transports[0].send(torch.zeros(4, dtype=torch.uint8), 2)
        with pytest.raises(RefitAbortedError, match="rank 0: connecting for send to rank 2"):
            transports[5].receive(torch.zeros(4, dtype=torch.uint8), 3)


def test_torch_is_asked_not_to_watch_and_nothing_else_sees_it(monkeypatch):
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    with ThreadWorld(mixed_ranks(in_rounds=True), over="nccl"):
        pass
    assert SimulatedNccl.made_with == ["1"] * 6
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    with ThreadWorld(mixed_ranks(in_rounds=True), over="nccl"):
        pass
    assert SimulatedNccl.made_with == ["1"] * 12
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


class Work:
    """A work that is complete after a number of looks, or never."""

    def __init__(self, looks: int | None) -> None:
        self.looks = looks
        self.waited = False

    def is_completed(self) -> bool:
        if self.looks is None:
            return False
        self.looks -= 1
        return self.looks < 0

    def wait(self) -> None:
        self.waited = True


def test_a_wait_ends_with_the_work_with_the_deadline_or_with_the_refit():
    backend = BackendWithoutGpu(CPU)
    called_off = threading.Event()
    work = Work(20)
    backend.wait(work, Deadline.after(5.0), called_off)
    assert work.waited
    with pytest.raises(TimeoutError):
        backend.wait(Work(None), Deadline.after(0.05), called_off)
    threading.Timer(0.05, called_off.set).start()
    with pytest.raises(RuntimeError, match="called off"):
        backend.wait(Work(None), Deadline.after(60.0), called_off)


def test_a_kernel_that_was_broken_off_is_no_success():
    """NCCL ends it without its bytes, and then it counts as complete."""
    called_off = threading.Event()
    called_off.set()
    work = Work(0)
    with pytest.raises(RuntimeError, match="called off"):
        BackendWithoutGpu(CPU).wait(work, Deadline.after(5.0), called_off)
    assert not work.waited


def test_an_error_while_messages_are_started_leaves_no_group_open():
    group = SimulatedNccl(None, 0, 2, SimulatedNccl.Options())

    def breaks():
        raise RuntimeError("invalid usage")

    group._end = object()
    with pytest.raises(RuntimeError, match="invalid usage"):
        BackendWithoutGpu(CPU).start_together(group, [breaks])
    assert group._open is None


def test_a_group_that_cannot_be_broken_off_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(nccl_backend, "_BREAK_OFF_S", 0.05)
    release = threading.Event()

    class Stuck:
        def abort(self):
            release.wait()

    start_s = time.monotonic()
    BackendWithoutGpu(CPU).break_off(Stuck())
    assert time.monotonic() - start_s < 5.0
    release.set()


def test_buffers_of_another_device_are_refused():
    with ThreadWorld(mixed_ranks(in_rounds=True), over="nccl") as world:
        transport = world.sessions[0]._joined.seat.transport
        with pytest.raises(TransportError, match="send to rank 1 needs a buffer on cpu, not on meta"):
            transport.send(torch.zeros(4, dtype=torch.uint8, device="meta"), 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no CUDA")
def test_without_a_gpu_the_backend_says_what_is_missing():
    with pytest.raises(TransportError, match="needs a CUDA device"):
        NcclBackend(CPU)


def test_torch_has_what_the_backend_calls():
    """Of the installed torch, which may be built without NCCL: the calls are those of every backend."""
    backend = torch._C._distributed_c10d.Backend
    for call in ("_start_coalescing", "_end_coalescing", "eager_connect_single_device", "abort", "send", "recv"):
        assert callable(getattr(backend, call)), call
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    text = header.read_text()
    assert "TORCH_NCCL_BLOCKING_WAIT" in text
    assert "bool blockingWait_" in text
