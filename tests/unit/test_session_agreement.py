"""Agreements: what ranks are told when they differ, are late, or are called off."""

from __future__ import annotations

from functools import partial

import pytest
from torch.distributed import HashStore

from nemo_rl_reshard.errors import HandshakeError, RefitAbortedError, TransportTimeoutError
from nemo_rl_reshard.runtime.handshake import Agreement, differences
from nemo_rl_reshard.runtime.one_process import together
from nemo_rl_reshard.transport.deadline import Deadline


def seats(size: int) -> list[Agreement]:
    store = HashStore()
    return [Agreement(store, rank, size, generation=1) for rank in range(size)]


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


def test_keys_of_the_past_are_forgotten() -> None:
    """A long run leaves the store as small as a short one."""
    store = HashStore()
    ranks = [Agreement(store, rank, 2, generation=1) for rank in range(2)]
    sizes = []
    for _ in range(4):
        together({rank: partial(seat.reach, "x", {}, Deadline.after(5)) for rank, seat in enumerate(ranks)}, 10)
        sizes.append(store.num_keys())
    assert sizes[1] == sizes[2] == sizes[3]


def test_everyone_learns_who_differs() -> None:
    calls = {
        rank: partial(seat.reach, "the plan", {"digest": "b" if rank == 1 else "a"}, Deadline.after(5))
        for rank, seat in enumerate(seats(3))
    }
    outcomes = together(calls, 10)
    assert {type(outcome) for outcome in outcomes.values()} == {HandshakeError}
    assert 'digest: ranks [0, 2] say "a"; ranks [1] say "b"' in str(outcomes[2])


def test_silent_ranks_are_named() -> None:
    ranks = seats(4)
    calls = {rank: partial(ranks[rank].reach, "the plan", {}, Deadline.after(0.2)) for rank in (0, 2)}
    outcomes = together(calls, 10)
    assert isinstance(outcomes[0], TransportTimeoutError)
    assert "nothing from ranks 1, 3" in str(outcomes[0])
    assert "nothing from rank 0" in str(outcomes[2])


def test_a_call_off_reaches_those_who_wait() -> None:
    """The first reason stays."""
    ranks = seats(3)
    ranks[1].call_off("out of memory")
    ranks[2].call_off("me too")
    with pytest.raises(RefitAbortedError, match="rank 1 called the refit off: out of memory"):
        ranks[0].reach("the plan", {}, Deadline.after(5))
