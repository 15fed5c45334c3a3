"""Building refit worlds under Ray: one order of creation, and nothing left of a half-built one. B15 B16."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from equipment.ray_light import SPECS, LightWorld

from nemo_rl_reshard.config import RefitConfig
from nemo_rl_reshard.errors import DeclarationError, RefitError
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.orchestration.epoch import next_epoch
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.world import Seating, WorldHost

pytestmark = pytest.mark.ray


class Asking:
    """Asks members one by one, in an epoch of its own, as a controller asks them together."""

    def __init__(self) -> None:
        self.epoch = next_epoch(0)

    def __call__(self, member: Member, rank: int, operation: str, **argument: Any) -> ray.ObjectRef[Any]:
        return member.submit(operation, [{"rank": rank, "epoch": self.epoch, "answer_within_s": 20.0, **argument}])


def outcomes(references: list[Any]) -> list[Outcome]:
    return [Outcome.from_plain(answer) for (answer,) in ray.get(references, timeout=60)]


def test_b15_worlds_joined_in_opposite_orders_fail_in_time_and_leave_nothing_behind(light: LightWorld):
    engines, submit = light.engines, Asking()
    seating = Seating(dict(enumerate(engines)), num_trainers=0, size=2)
    worlds = [WorldHost(seating, "127.0.0.1", generation, deadline_s=3.0) for generation in (1, 2, 3)]
    try:
        first, second, third = (world.to_plain() for world in worlds)
        specs = [[spec.name, list(spec.shape), spec.dtype] for spec in SPECS]
        declared = [submit(engine, rank, "declare", specs=specs, num_trainers=0) for rank, engine in enumerate(engines)]
        assert all(outcome.fault is None for outcome in outcomes(declared))
        crossed = [
            submit(engines[0], 0, "connect", world=first),
            submit(engines[1], 1, "connect", world=second),
            submit(engines[0], 0, "connect", world=second),
            submit(engines[1], 1, "connect", world=first),
        ]
        faults = [outcome.fault for outcome in outcomes(crossed)]
        assert all(faults), faults
        assert "ranks [1] did not come within 3 s" in str(faults[0])
        assert "ranks [0] did not come within 3 s" in str(faults[1])
        assert "HandshakeError: rank 1 left generation 2" in str(faults[3]), "generations only go up, on every rank"
        together = [submit(engine, rank, "connect", world=third) for rank, engine in enumerate(engines)]
        assert all(outcome.fault is None for outcome in outcomes(together))
        closed = [submit(engine, rank, "close", failure=None) for rank, engine in enumerate(engines)]
        assert all(outcome.fault is None for outcome in outcomes(closed))
        assert ray.get([engine.handle.threads.remote() for engine in engines], timeout=30) == [[], []]
    finally:
        for world in worlds:
            world.close()


def test_b16_a_rank_that_sits_in_a_world_of_its_own_is_found_before_any_byte_moves(light: LightWorld):
    """Engine 1 is told of a smaller world at the same meeting place."""
    submit = Asking()
    seating = Seating(dict(enumerate(light.engines)), num_trainers=0, size=2)
    world = WorldHost(seating, "127.0.0.1", 1, deadline_s=3.0)
    try:
        plain = world.to_plain()
        specs = [[spec.name, list(spec.shape), spec.dtype] for spec in SPECS]
        outcomes(
            [submit(each, rank, "declare", specs=specs, num_trainers=0) for rank, each in enumerate(light.engines)]
        )
        odd = {**plain, "size": 3}
        found = outcomes(
            [
                submit(light.engines[0], 0, "connect", world=plain),
                submit(light.engines[1], 1, "connect", world=odd),
            ]
        )
        assert all(outcome.fault is not None for outcome in found)
        assert any("world of" in str(outcome.fault) or "did not come" in str(outcome.fault) for outcome in found)
    finally:
        world.close()


def test_a_side_that_does_not_fit_is_one_error_before_any_world_stands(light: LightWorld):
    config = RefitConfig.read({"setup_s": 30, "grace_s": 5})
    # Two of three trainers: rows of every tensor are missing.
    controller = RefitController(light.trainers[:2], light.engines, config)
    with pytest.raises(DeclarationError, match=f"{SPECS[0].name}: no rank holds elements"):
        controller.refit(1)
    assert controller.generation == 0
    controller.close()


def test_an_engine_that_wants_what_no_trainer_has_says_so(light: LightWorld):
    ray.get(light.engines[0].handle.want.remote("model.extra.weight"), timeout=30)
    controller = light.controller()
    with pytest.raises(RefitError, match=r"no trainer has model\.extra\.weight") as failed:
        controller.refit(1)
    assert list(failed.value.causes) == ["rank 3 (engine 0)"]
    light.replace_engine(0)


def test_b73_a_variable_that_one_engine_has_set_otherwise_is_named(light: LightWorld, caplog: pytest.LogCaptureFixture):
    light.replace_engine(1, NCCL_CUMEM_ENABLE="0")
    controller = light.controller()
    with caplog.at_level("WARNING", logger="nemo_rl_reshard"):
        light.fill(1)
        controller.refit(1)
    controller.close()
    light.assert_serves(1)
    (said,) = [message for message in caplog.messages if "NCCL_CUMEM_ENABLE" in message]
    assert said.endswith("unset on trainer ranks 0-2; unset on inference ranks 3; '0' on inference ranks 4")
    light.replace_engine(1)
