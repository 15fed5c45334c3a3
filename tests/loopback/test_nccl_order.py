"""Why there are rounds: what is safe over sockets deadlocks where streams run one thing after the other. B60 B68."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from equipment.nccl_semantics import DeadlockError, NcclHub, NcclLikeTransport
from equipment.nccl_worlds import NcclLikeWorld
from equipment.refit_worlds import MLP, mesh_layout, mixed_ranks, planned_ranks

from nemo_rl_reshard.errors import RefitAbortedError, TargetError
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime.one_process import together
from nemo_rl_reshard.transport.deadline import Deadline


@pytest.mark.parametrize("kind", [{}, {"one_stream": True}, {"connected": True}], ids=str)
def test_rounds_finish(kind):
    world = NcclLikeWorld(mixed_ranks(in_rounds=True), NcclHub(6, **kind))
    for version in (1, 2):
        reports = world.refit(version)
    assert any(report["bytes_received"]["fast"] for report in reports.values()), "engines forward to each other"


@pytest.mark.parametrize("pairs_apart", [False, True])
@pytest.mark.parametrize("connected", [False, True])
@pytest.mark.parametrize("one_stream", [False, True])
def test_windows_of_single_messages_deadlock_b60(pairs_apart, connected, one_stream, monkeypatch):
    """Two engines that forward to each other both wait for their receive, and each send lies behind the other's.

    This order is right over sockets; neither pairs that are connected nor a communicator for each pair save it here.
    """
    monkeypatch.setattr(NcclLikeTransport, "in_rounds", False)
    hub = NcclHub(6, pairs_apart=pairs_apart, connected=connected, one_stream=one_stream)
    world = NcclLikeWorld(mixed_ranks(in_rounds=True), hub)
    with pytest.raises(DeadlockError, match=r"(?s)all ranks are stuck.*rank 2 waits for.*message 4 -> 2"):
        world.refit(1)


@pytest.mark.parametrize(("in_flight", "most"), [(1, 2), (2, 2), (3, 2), (4, 4), (64, 8)])
def test_b68_a_round_has_a_bounded_number_of_messages(in_flight, most):
    """Sends and receives counted together: 128 bytes of staging are eight messages each way, in two rounds."""
    trainers, engines = range(2), range(2, 4)
    shape = (4, 4)
    names = [MLP.replace("layers.0", f"layers.{layer}") for layer in range(12)]
    ranks = planned_ranks(
        [(name, mesh_layout(shape, (2,), trainers, "S(0)"), "float32") for name in names],
        [(name, mesh_layout(shape, (2,), engines, "R"), "float32") for name in names],
        num_trainers=2,
        num_targets=2,
        domains=(tuple(engines),),
        options=PlanOptions(bucket_bytes=128, message_bytes=16),
        in_flight=in_flight,
        in_rounds=True,
    )
    world = NcclLikeWorld(ranks, NcclHub(4))
    world.refit(1, verify="off")
    assert world.hub.most_operations == most


def test_one_failing_rank_wakes_ranks_that_wait_in_a_round():
    world = NcclLikeWorld(mixed_ranks(in_rounds=True), NcclHub(6))

    def fails(_tensor):
        raise TargetError("no memory for the layer")

    world.live[3].target.tensor_done = fails
    outcomes = world.outcomes(1)
    assert isinstance(outcomes[3], TargetError)
    assert {rank for rank, outcome in outcomes.items() if isinstance(outcome, RefitAbortedError)} == {0, 1, 2, 4, 5}


def exchange(transport: NcclLikeTransport, peer: int, *, in_one: bool) -> int:
    """Send own rank, receive the peer's; the receive is started first."""
    landing = torch.zeros(1, dtype=torch.uint8)
    own = torch.tensor([transport.rank], dtype=torch.uint8)
    deadline = Deadline.after(5.0)
    if in_one:
        with transport.together():
            pending = [transport.receive(landing, peer), transport.send(own, peer)]
    else:
        pending = [transport.receive(landing, peer), transport.send(own, peer)]
    for each in pending:
        each.wait(deadline)
    return int(landing.item())


@pytest.mark.parametrize("connected", [False, True])
def test_the_simulation_blocks_where_nccl_does(connected):
    hub = NcclHub(2, connected=connected)
    ends = [hub.transport(rank) for rank in range(2)]
    calls = {rank: partial(exchange, ends[rank], 1 - rank, in_one=True) for rank in range(2)}
    assert together(calls, 10.0) == {0: 1, 1: 0}
    hub = NcclHub(2, connected=connected)
    ends = [hub.transport(rank) for rank in range(2)]
    calls = {rank: partial(exchange, ends[rank], 1 - rank, in_one=False) for rank in range(2)}
    assert all(isinstance(outcome, DeadlockError) for outcome in together(calls, 10.0).values())
