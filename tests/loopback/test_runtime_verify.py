"""`refit.verify` finds bytes that changed on the way, says where, and publishes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from equipment.refit_worlds import ThreadWorld, mesh_layout, planned_ranks
from torch import Tensor

from nemo_rl_reshard.errors import RefitAbortedError, VerificationError
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime.leftover_plan import Gather
from nemo_rl_reshard.runtime.order import VerifyMode
from nemo_rl_reshard.runtime.verify import ONE_IN, Verification
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Pending, Transport

W, NORM = "model.layers.3.mlp.down_proj.weight", "model.norm.weight"


class _Altered:
    """A pending whose bytes change when they have arrived."""

    def __init__(self, inner: Pending, alter: Callable[[], None]) -> None:
        self._inner = inner
        self._alter = alter

    def wait(self, deadline: Deadline) -> None:
        self._inner.wait(deadline)
        self._alter()


class _Flipping:
    """Flips a bit in the first message, or collective of a kind, that its rank receives.

    The first gather is that of the agreement and is left alone.
    """

    def __init__(self, inner: Transport, where: str) -> None:
        self.rank, self.size = inner.rank, inner.size
        self.device, self.in_rounds, self.together = inner.device, inner.in_rounds, inner.together
        self._inner = inner
        self._where = where
        self._skips = 1 if where == "all_gather" else 0

    def send(self, buffer: Tensor, dst: int) -> Pending:
        return self._inner.send(buffer, dst)

    def receive(self, buffer: Tensor, src: int) -> Pending:
        return self._alter("receive", self._inner.receive(buffer, src), buffer)

    def all_gather(self, output: Tensor, own: Tensor, ranks: tuple[int, ...]) -> Pending:
        return self._alter("all_gather", self._inner.all_gather(output, own, ranks), output)

    def broadcast(self, buffer: Tensor, root: int, ranks: tuple[int, ...]) -> Pending:
        return self._alter("broadcast", self._inner.broadcast(buffer, root, ranks), buffer)

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

    def _alter(self, call: str, pending: Pending, buffer: Tensor) -> Pending:
        if call != self._where:
            return pending
        if self._skips:
            self._skips -= 1
            return pending
        self._where = "done"

        def flip() -> None:
            buffer[-1] ^= 1

        return _Altered(pending, flip)


def world(policy: RoutePolicy, gather: Gather | None = None) -> ThreadWorld:
    return ThreadWorld(
        planned_ranks(
            [
                (W, mesh_layout((6, 6), (2,), range(2), "S(0)"), "float32"),
                (NORM, mesh_layout((8,), (2,), range(2), "S(0)"), "float32"),
            ],
            [
                (W, mesh_layout((6, 6), (3,), range(2, 5), "S(1)"), "bfloat16"),
                (NORM, mesh_layout((8,), (3,), range(2, 5), "R"), "float32"),
            ],
            num_trainers=2,
            num_targets=3,
            policy=policy,
            options=PlanOptions(bucket_bytes=256, message_bytes=16),
            gather=gather,
        )
    )


@pytest.mark.parametrize(
    ("policy", "rank", "where", "says"),
    [
        (RoutePolicy.ALL, 3, "receive", r"is not what rank [01] sent"),
        (RoutePolicy.FFN, 4, "receive", r"is not what rank [01] sent"),
        (RoutePolicy.FFN, 0, "all_gather", "as gathered is not what trainer rank 1 holds"),
        (RoutePolicy.FFN, 3, "broadcast", "as received is not what rank 0 sent"),
    ],
)
def test_a_flipped_bit_is_found_and_named(policy: RoutePolicy, rank: int, where: str, says: str) -> None:
    """`B16`: direct, gathered and broadcast bytes; the message names the tensor, the region and the sender."""
    with world(policy, None if where == "receive" else Gather.EVERYWHERE) as refits:
        refits.wrap[rank] = lambda inner: _Flipping(inner, where)
        refits.rebuild()
        for each in refits.live.values():
            each.fill(1)
        outcomes = refits.outcomes(1, verify="full")
        assert isinstance(outcomes[rank], VerificationError)
        assert re.search(says, str(outcomes[rank]))
        assert (W if where == "receive" else NORM) in str(outcomes[rank])
        assert {type(outcome) for other, outcome in outcomes.items() if other != rank} == {RefitAbortedError}
        assert all(session.version is None for session in refits.sessions.values())
        refits.rebuild()
        refits.refit(2)


def test_b16_direct_bytes_are_judged_before_any_leftover_is_loaded() -> None:
    """What was corrupted is found where it was compared, not by a later stage that happens to look at the same list."""
    with world(RoutePolicy.FFN, Gather.EVERYWHERE) as refits:
        refits.refit(1)
        refits.wrap[3] = lambda inner: _Flipping(inner, "receive")
        refits.rebuild()
        for each in refits.live.values():
            each.fill(2)
        outcomes = refits.outcomes(2, verify="full")
        assert isinstance(outcomes[3], VerificationError)
        assert f"{W}: region" in str(outcomes[3])
        target = refits.live[3].target
        assert target.done == [W]
        assert target.loaded == []


def test_what_never_arrives_is_no_number() -> None:
    """`B16`: a receive that returns without data leaves NaN behind in verify mode, never the last refit's bytes."""
    with world(RoutePolicy.ALL) as refits:
        refits.refit(1)

        class Nothing(_Flipping):
            def receive(self, buffer: Tensor, src: int) -> Pending:
                scratch = torch.empty_like(buffer)
                return self._inner.receive(scratch, src)

        refits.wrap[3] = lambda inner: Nothing(inner, "")
        refits.rebuild()
        outcomes = refits.outcomes(2, verify="full")
        assert isinstance(outcomes[3], VerificationError)
        ((_, values),) = refits.live[3].target.shards[W]
        assert values.isnan().any()


@pytest.mark.parametrize(("gather", "comparing"), [(None, (2, 3, 4)), (Gather.EVERYWHERE, (0, 2, 3, 4))])
def test_off_compares_nothing_and_full_everything(gather: Gather | None, comparing: tuple[int, ...]) -> None:
    with world(RoutePolicy.FFN, gather) as refits:
        assert all(report["num_verified"] == 0 for report in refits.refit(1, verify="off").values())
        reports = refits.refit(2, verify="full")
        assert all(reports[rank]["num_verified"] > 0 for rank in comparing)


def test_a_sample_is_another_one_at_every_version() -> None:
    names = [f"w{index}" for index in range(640)]

    def picked(version: int, seed: int = 0) -> set[str]:
        sample = Verification(VerifyMode.SAMPLE, version, seed, _Flipping.__new__(_Rankless))
        return {name for name in names if sample.picks(name)}

    first = picked(1)
    assert len(names) / ONE_IN / 2 < len(first) < len(names) / ONE_IN * 2
    assert first == picked(1)
    assert first != picked(2)
    assert first != picked(1, seed=1)


class _Rankless(_Flipping):
    rank, size = 0, 1
