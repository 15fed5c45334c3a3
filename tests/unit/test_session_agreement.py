"""Agreements: what ranks are told when they differ, are late, or are called off."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from equipment.declaring import layout, refit
from torch.distributed import HashStore

from nemo_rl_reshard.errors import HandshakeError, RefitAbortedError, TransportTimeoutError
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.assignment import Assignment
from nemo_rl_reshard.runtime.handout import hand_out
from nemo_rl_reshard.runtime.handshake import Agreement, differences
from nemo_rl_reshard.runtime.leftover_plan import Gather
from nemo_rl_reshard.runtime.one_process import together
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.loopback import LoopbackHub


def seats(size: int, store: HashStore | None = None) -> list[Agreement]:
    hub, shared = LoopbackHub(size), store or HashStore()
    return [Agreement(hub.transport(rank), shared, generation=1) for rank in range(size)]


def test_differences_name_every_field_and_rank() -> None:
    said = [{"plan": "a", "size": 3}, {"plan": "b", "size": 3}, {"plan": "a"}]
    assert differences(said) == [
        'plan: ranks [0, 2] say "a"; ranks [1] say "b"',
        "size: ranks [0, 1] say 3; ranks [2] say null",
    ]
    assert differences([{"plan": "a"}] * 3) == []


def test_equal_statements_agree_again_and_again() -> None:
    ranks = seats(3)
    for version in range(4):
        calls = {
            rank: partial(seat.reach, "x", {"version": version}, Deadline.after(5)) for rank, seat in enumerate(ranks)
        }
        assert set(together(calls, 10).values()) == {None}


def test_the_store_does_not_grow() -> None:
    """A long run leaves the store as small as a short one."""
    store = HashStore()
    ranks = seats(2, store)
    sizes = []
    for _ in range(3):
        together({rank: partial(seat.reach, "x", {}, Deadline.after(5)) for rank, seat in enumerate(ranks)}, 10)
        sizes.append(store.num_keys())
    assert len(set(sizes)) == 1


def test_everyone_learns_who_differs() -> None:
    calls = {
        rank: partial(seat.reach, "the plan", {"digest": "b" if rank == 1 else "a"}, Deadline.after(5))
        for rank, seat in enumerate(seats(3))
    }
    outcomes = together(calls, 10)
    assert {type(outcome) for outcome in outcomes.values()} == {HandshakeError}
    assert 'digest: ranks [0, 2] say "a"; ranks [1] say "b"' in str(outcomes[2])


def test_absent_ranks_are_named() -> None:
    ranks = seats(4)
    for _ in range(2):  # that they came before does not count
        together({r: partial(seat.reach, "x", {}, Deadline.after(5)) for r, seat in enumerate(ranks)}, 10)
    calls = {rank: partial(ranks[rank].reach, "the plan", {}, Deadline.after(0.2)) for rank in (0, 2)}
    outcomes = together(calls, 10)
    assert {type(outcome) for outcome in outcomes.values()} <= {TransportTimeoutError, RefitAbortedError}
    named = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, TransportTimeoutError)]
    assert named
    assert "agreeing on the plan passed its deadline of 0.2 s; ranks [1, 3] did not come" in named[0]


def test_a_call_off_reaches_those_who_wait() -> None:
    hub = LoopbackHub(3)
    hub.transport(1).abort("out of memory")
    with pytest.raises(RefitAbortedError, match="out of memory"):
        Agreement(hub.transport(0), HashStore(), generation=1).reach("the plan", {}, Deadline.after(5))


def test_ranks_state_all_that_must_be_equal_before_a_byte_moves() -> None:
    """Another plan, other batches of leftovers, other buffers: each is a statement that differs, field by field."""
    spec = TensorSpec("model.norm.weight", (8,), "float32")
    given = layout((8,), (2,), "S(0)", (0, 1))
    found = refit([(spec, given, layout((8,), (1,), "R", (2,)))], (0, 1), (2,), policy=RoutePolicy.FFN)
    plan = make_plan(found.source, found.target, found.routes, found.topology, broadcast=True)

    def stated(**options: Any) -> dict[str, Any]:
        return Assignment.from_plain(hand_out(plan, found.source, **options).of_rank(2), 2).statement()

    same = stated()
    assert same == stated()
    assert {name for name in same if same[name] != stated(in_rounds=True)[name]} == {"rounds_digest"}
    assert {name for name in same if same[name] != stated(in_flight=2)[name]} == {"in_flight"}
    assert {name for name in same if same[name] != stated(gather=Gather.ROOT)[name]} == {"leftovers_digest"}
    smaller = make_plan(found.source, found.target, found.routes, found.topology, PlanOptions(64, 32), broadcast=True)
    other = Assignment.from_plain(hand_out(smaller, found.source).of_rank(2), 2).statement()
    differing = {name for name in same if same[name] != other[name]}
    assert differing == {"plan_digest", "message_bytes", "bucket_bytes"}
