"""Whether a refit failed before its first write: proven by what every engine answers, else taken for written. B61."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch
from equipment.ray_faults import Planned
from equipment.ray_light import GATE, LAST, SPECS, LightWorld, need_of, whole

from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.shared import Shared

pytestmark = pytest.mark.ray


@pytest.fixture
def controller(light: LightWorld):
    """Every engine holds version 1, and the world stands."""
    made = light.controller()
    light.fill(1)
    made.refit(1)
    yield made
    made.close()


def fail(light: LightWorld, controller: RefitController, version: int) -> RefitError:
    light.fill(version)
    with pytest.raises(RefitError) as failed:
        controller.refit(version)
    return failed.value


def arm(light: LightWorld, controller: RefitController, member: Member, fault: Planned) -> None:
    """Strike `fault` in the next refit, in a world that stands by then."""
    light.arm(member, fault)
    controller.close()
    if fault.tensor != "manifest":
        controller.plan()


def assert_held(light: LightWorld, version: int, engines: Sequence[int] = (0, 1)) -> None:
    """Whole tensors of `version`, though none may be served."""
    for engine in engines:
        held = ray.get(light.engines[engine].handle.held.remote(), timeout=60)
        for spec in SPECS:
            assert torch.equal(held[spec.name], whole(spec, version)[need_of(spec, engine).slices]), spec.name


def succeed(light: LightWorld, controller: RefitController, version: int) -> None:
    light.fill(version)
    controller.refit(version)
    light.assert_serves(version)


@dataclass(frozen=True)
class Misled(Member):
    """Takes every order for one of another version."""

    def submit(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Shared | None = None
    ) -> ray.ObjectRef[Any]:
        if operation == "refit":
            order = arguments[0]["order"]
            arguments = [{**arguments[0], "order": {**order, "version": order["version"] + 100}}]
        return super().submit(operation, arguments, shared)


@pytest.mark.parametrize("side", ["trainers", "engines"])
def test_ranks_that_do_not_agree_have_written_nothing(light: LightWorld, controller: RefitController, side: str):
    honest = getattr(light, side)[1]
    controller.replace(Misled(honest.name, honest.side, 1, honest.handle))
    error = fail(light, controller, 2)
    assert "do not agree on the coming refit" in str(error)
    assert error.before_first_write
    assert_held(light, 1)
    controller.replace(honest)
    succeed(light, controller, 3)


def test_a_rank_that_cannot_start_keeps_every_engine_from_writing(light: LightWorld, controller: RefitController):
    """The others wait for it to agree, and are called off there."""
    ray.get(light.trainers[0].handle.lose_plan.remote(), timeout=30)
    error = fail(light, controller, 2)
    assert list(error.causes) == ["rank 0 (trainer 0)"]
    assert error.before_first_write
    assert_held(light, 1)
    succeed(light, controller, 3)


def test_an_engine_that_is_not_idle_has_not_written(light: LightWorld, controller: RefitController):
    ray.get(light.engines[1].handle.have_requests.remote(2, 0), timeout=30)
    error = fail(light, controller, 2)
    assert "2 unfinished requests" in str(error)
    assert error.before_first_write
    assert_held(light, 1)
    succeed(light, controller, 3)


def test_an_engine_found_busy_inside_the_refit_has(light: LightWorld, controller: RefitController):
    ray.get(light.engines[1].handle.have_requests.remote(0, 2, 0), timeout=30)
    assert not fail(light, controller, 2).before_first_write
    succeed(light, controller, 3)


@pytest.mark.parametrize("tensor", [GATE, LAST])
def test_an_engine_that_fails_while_it_is_written_counts_as_written(
    light: LightWorld, controller: RefitController, tensor: str
):
    arm(light, controller, light.engines[1], Planned("raise", tensor))
    assert not fail(light, controller, 2).before_first_write
    succeed(light, controller, 3)


@pytest.mark.parametrize("tensor", [GATE, LAST])
def test_a_trainer_that_fails_after_the_ranks_agreed_leaves_whole_engines_or_says_otherwise(
    light: LightWorld, controller: RefitController, tensor: str
):
    """Engines open as soon as they know that all agree, whatever the trainer still had to send."""
    arm(light, controller, light.trainers[1], Planned("raise", tensor))
    error = fail(light, controller, 2)
    assert list(error.causes) == ["rank 1 (trainer 1)"]
    if error.before_first_write:
        assert_held(light, 1)
    succeed(light, controller, 3)


def test_what_was_written_is_remembered_until_a_refit_succeeds(light: LightWorld, controller: RefitController):
    """Engines with half of a refit in them are not whole because the next attempt never came to write."""
    arm(light, controller, light.engines[0], Planned("raise", LAST))
    assert not fail(light, controller, 2).before_first_write
    arm(light, controller, light.trainers[0], Planned("raise", "manifest"))
    error = fail(light, controller, 3)
    assert "declare failed" in str(error)
    assert not error.before_first_write
    succeed(light, controller, 4)
    arm(light, controller, light.trainers[0], Planned("raise", "manifest"))
    assert fail(light, controller, 5).before_first_write
    assert_held(light, 4)
    succeed(light, controller, 6)


def test_b61_an_engine_that_dies_in_a_refit_may_have_written(light: LightWorld, controller: RefitController):
    ray.get(light.engines[1].handle.die_in.remote("refit"), timeout=30)
    error = fail(light, controller, 2)
    assert list(error.causes) == ["rank 4 (engine 1)"]
    assert not error.before_first_write, "nobody can know"
    assert_held(light, 1, engines=[0])
    controller.replace(light.replace_engine(1))
    succeed(light, controller, 3)


def test_b61_an_engine_that_stops_answering_in_a_refit_may_have_written(light: LightWorld, controller: RefitController):
    arm(light, controller, light.engines[0], Planned("stall", GATE))
    error = fail(light, controller, 2)
    assert controller.lost == {"engine 0"}
    assert not error.before_first_write
    controller.replace(light.replace_engine(0))
    succeed(light, controller, 3)


@pytest.mark.parametrize("operation", ["declare", "connect", "adopt"])
def test_b61_an_engine_that_dies_before_the_refit_has_not(
    light: LightWorld, controller: RefitController, operation: str
):
    controller.close()
    ray.get(light.engines[1].handle.die_in.remote(operation), timeout=30)
    error = fail(light, controller, 2)
    assert f"{operation} failed" in str(error)
    assert list(error.causes) == ["rank 4 (engine 1)"]
    assert error.before_first_write
    assert_held(light, 1, engines=[0])
    controller.replace(light.replace_engine(1))
    succeed(light, controller, 3)


def test_a_dead_trainer_has_written_into_no_engine(light: LightWorld, controller: RefitController):
    ray.kill(light.trainers[2].handle)
    light.trainers[2] = light._trainer(2)
    with pytest.raises(RefitError) as failed:
        controller.refit(2)
    assert list(failed.value.causes) == ["rank 2 (trainer 2)"]
    assert failed.value.before_first_write, "the engines were waiting for it to agree"
    assert_held(light, 1)
    controller.replace(light.trainers[2])
    succeed(light, controller, 3)


def test_once_every_rank_has_finished_all_have_written(light: LightWorld, controller: RefitController):
    ray.get(light.engines[1].handle.die_in.remote("publish"), timeout=30)
    error = fail(light, controller, 2)
    assert "publish failed" in str(error)
    assert not error.before_first_write
    controller.replace(light.replace_engine(1))
    succeed(light, controller, 3)
