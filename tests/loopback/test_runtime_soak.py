"""200 random faults, over loopback and over gloo: no hang, nothing published after a failure, the next refit right."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from equipment.faulty_transport import Delay, FaultyTransport, Raise
from equipment.refit_worlds import ThreadWorld, mixed_ranks

from nemo_rl_reshard.errors import RefitAbortedError, ReshardError
from nemo_rl_reshard.runtime.session import SessionState

NUM_FAULTS = {"loopback": 130, "gloo": 70}


def inject(world: ThreadWorld, dice: random.Random) -> str:
    """Arm one fault somewhere; a transport's strikes in the generation that is joined next."""
    rank = dice.randrange(6)
    kind = dice.choice(["raise in transport", "delay in transport", "raise at an end"])
    if kind == "raise at an end":
        each = world.live[rank]
        end, calls = (
            (each.source, ["view"])
            if each.source is not None
            else (each.target, ["begin", "view", "tensor_done", "load", "finish"])
        )
        call = dice.choice(calls)
        real, left = getattr(end, call), [dice.randrange(4) if call == "view" else 0]

        def raising(*arguments: Any) -> Any:
            if left[0] == 0:
                end.__dict__.pop(call, None)
                raise RuntimeError(f"injected in {call}")
            left[0] -= 1
            return real(*arguments)

        setattr(end, call, raising)
        return f"{call} raises on rank {rank}"
    place = dice.randrange(12)
    fault = Raise("injected") if kind == "raise in transport" else Delay(dice.choice([0.001, 0.02]))
    world.wrap[rank] = lambda inner: FaultyTransport(inner, {place: fault})
    return f"{fault} at operation {place} of rank {rank}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("over", ["loopback", "gloo"])
def test_soak(over: str) -> None:
    """`B60`..`B63`: 130 faults over loopback and 70 over gloo."""
    dice = random.Random(7)
    start_s = time.monotonic()
    num_failed = 0
    with ThreadWorld(mixed_ranks(), over=over, timeout_s=15.0) as world:
        world.refit(1)
        version = 1
        for turn in range(NUM_FAULTS[over]):
            what = inject(world, dice)
            world.rebuild()
            version += 1
            for each in world.live.values():
                each.fill(version)
            outcomes = world.outcomes(version, verify=dice.choice(["off", "sample", "full"]))
            failed = {rank for rank, outcome in outcomes.items() if isinstance(outcome, BaseException)}
            for each in world.live.values():
                for end in (each.source, each.target):
                    for call in ("view", "begin", "tensor_done", "load", "finish"):
                        vars(end).pop(call, None) if end is not None else None
            note = f"fault {turn}: {what}: {outcomes}"
            if failed:
                num_failed += 1
                assert failed == set(world.live), note
                assert all(session.version is None for session in world.sessions.values()), note
                assert {session.state for session in world.sessions.values()} == {SessionState.FAILED}, note
                causes = [o for o in outcomes.values() if not isinstance(o, RefitAbortedError)]
                assert len(causes) == 1, note
                assert "injected" in str(causes[0]), note
                assert isinstance(causes[0], RuntimeError | ReshardError), note
                assert all(each.target.version != version for each in world.live.values() if each.target), note
            else:
                assert {session.version for session in world.sessions.values()} == {version}, note
            if turn % 10 == 9:
                world.rebuild()
                version += 1
                world.refit(version)
        world.rebuild()
        world.refit(version + 1)
    assert num_failed > NUM_FAULTS[over] / 3
    assert time.monotonic() - start_s < 90
