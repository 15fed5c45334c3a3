"""Faults in a refit of light actors: one error, within the deadline, that tells the first cause from who waited."""

import time

import pytest
import ray
from equipment.ray_faults import Planned
from equipment.ray_light import DOWN, GATE, LAST, LightWorld

from nemo_rl_reshard.errors import RefitError, StateError
from nemo_rl_reshard.orchestration.controller import RefitController

pytestmark = pytest.mark.ray

DEADLINE_S, GRACE_S = 6.0, 5.0


@pytest.fixture
def controller(light: LightWorld):
    made = light.controller(deadline_s=DEADLINE_S, grace_s=GRACE_S)
    yield made
    made.close()


def fail(light: LightWorld, controller: RefitController, version: int) -> RefitError:
    """Run a refit that must fail in time, after which no engine may serve and nothing is published."""
    light.fill(version)
    controller.plan()  # the world stands before the clock starts
    start_s = time.monotonic()
    with pytest.raises(RefitError) as failed:
        controller.refit(version)
    # Deadline and grace bound the refit, a second grace the tear-down of ranks that do not answer.
    assert time.monotonic() - start_s < DEADLINE_S + 3 * GRACE_S
    for member in light.engines:
        if member.name not in controller.lost:
            with pytest.raises(ray.exceptions.RayTaskError, match="StateError"):
                ray.get(member.handle.generate.remote(), timeout=30)
    return failed.value


def succeed(light: LightWorld, controller: RefitController, version: int) -> None:
    light.fill(version)
    controller.refit(version)
    light.assert_serves(version)


@pytest.mark.parametrize("side", ["trainers", "engines"])
def test_b62_a_raise_in_a_rank_is_raised_at_the_driver(light, controller, side):
    succeed(light, controller, 100)
    member = getattr(light, side)[1]
    light.arm(member, Planned("raise", GATE))
    controller.close()  # the next world takes the fault along
    error = fail(light, controller, 101)
    (cause,) = error.causes.items()
    assert member.name in cause[0]
    assert f"ValueError: planned to fail at {GATE}" in cause[1]
    assert all("RefitAbortedError" in text for text in error.waiting.values())
    assert controller.lost == frozenset()
    succeed(light, controller, 102)
    assert controller.generation == 3


def test_b61_a_killed_engine_is_the_cause_and_its_replacement_is_right(light, controller):
    succeed(light, controller, 110)
    light.arm(light.engines[1], Planned("kill", LAST))
    controller.close()
    error = fail(light, controller, 111)
    assert list(error.causes) == ["rank 4 (engine 1)"]
    assert error.causes["rank 4 (engine 1)"].startswith("died: its actor is gone")
    assert set(error.waiting) <= {f"rank {rank} (trainer {rank})" for rank in range(3)} | {"rank 3 (engine 0)"}
    assert controller.lost == {"engine 1"}
    with pytest.raises(StateError, match="lost and not replaced: engine 1"):
        controller.refit(112)
    controller.replace(light.replace_engine(1))
    succeed(light, controller, 112)
    succeed(light, controller, 113)
    assert controller.num_plans == 1, "the same layout needs no new plan"


def test_a_killed_trainer_is_the_cause_and_its_restarted_group_is_right(light, controller):
    light.arm(light.trainers[1], Planned("kill", DOWN))
    error = fail(light, controller, 121)
    assert list(error.causes) == ["rank 1 (trainer 1)"]
    assert controller.lost == {"trainer 1"}
    controller.replace_trainers(light.replace_trainers())
    succeed(light, controller, 120)
    succeed(light, controller, 121)


def test_an_engine_killed_between_refits_is_named_by_the_next(light, controller):
    succeed(light, controller, 130)
    ray.kill(light.engines[0].handle)
    light.fill(131)
    with pytest.raises(RefitError) as failed:
        controller.refit(131)
    assert list(failed.value.causes) == ["rank 3 (engine 0)"]
    controller.replace(light.replace_engine(0))
    succeed(light, controller, 132)


def test_a_stalled_rank_is_the_cause_though_only_the_others_time_out(light, controller):
    light.arm(light.engines[0], Planned("stall", GATE))
    error = fail(light, controller, 141)
    assert list(error.causes) == ["rank 3 (engine 0)"]
    assert error.causes["rank 3 (engine 0)"].startswith("silent: gave no answer to refit")
    assert any("TransportTimeoutError" in text for text in error.waiting.values())
    controller.replace(light.replace_engine(0))
    succeed(light, controller, 142)


def test_a_stalled_rank_that_wakes_up_late_is_still_the_cause(light, controller):
    light.arm(light.trainers[2], Planned("stall", GATE, seconds=DEADLINE_S + GRACE_S - 2))
    error = fail(light, controller, 151)
    assert list(error.causes) == ["rank 2 (trainer 2)"]
    assert controller.lost == frozenset()
    succeed(light, controller, 152)


def test_two_ranks_that_fail_at_once_are_both_causes(light, controller):
    victim = ray.get(light.engines[1].handle.process_id.remote(), timeout=60)
    light.arm(light.trainers[0], Planned("kill and raise", GATE, pid=victim))
    error = fail(light, controller, 161)
    assert list(error.causes) == ["rank 0 (trainer 0)", "rank 4 (engine 1)"]
    assert "ValueError" in error.causes["rank 0 (trainer 0)"]
    assert len(error.waiting) == 3
    controller.replace(light.replace_engine(1))
    succeed(light, controller, 162)


def test_a_member_busy_with_its_own_work_delays_a_new_world_and_is_not_lost(light):
    controller = light.controller(deadline_s=DEADLINE_S, grace_s=1.0)
    succeed(light, controller, 165)
    working = light.engines[0].handle.work.remote(4.0)
    controller.close()
    assert controller.lost == frozenset()
    succeed(light, controller, 166)
    assert ray.get(working, timeout=10) is None
    controller.close()


def test_a_slow_member_is_not_lost_when_another_fails_to_declare(light):
    """Nothing can hurry a rank that sits in no world yet, so its slowness is no reason to replace it."""
    controller = light.controller(deadline_s=DEADLINE_S, grace_s=1.0)
    light.arm(light.engines[1], Planned("raise", "manifest"))
    working = light.engines[0].handle.work.remote(4.0)
    light.fill(167)
    with pytest.raises(RefitError, match="declare failed") as failed:
        controller.refit(167)
    assert list(failed.value.causes) == ["rank 4 (engine 1)"]
    assert "had not answered to declare" in failed.value.waiting["rank 3 (engine 0)"]
    assert controller.lost == frozenset()
    assert ray.get(working, timeout=10) is None
    succeed(light, controller, 168)
    controller.close()


def test_b63_an_engine_that_publishes_after_the_refit_was_given_up_takes_it_back(light):
    controller = light.controller(deadline_s=DEADLINE_S, grace_s=1.0)
    succeed(light, controller, 155)
    ray.get(light.engines[1].handle.publish_late.remote(4.0), timeout=30)
    light.fill(156)
    with pytest.raises(RefitError, match="publish failed") as failed:
        controller.refit(156)
    assert list(failed.value.causes) == ["rank 4 (engine 1)"]
    assert controller.lost == {"engine 1"}
    # Answered only after the late publication, and after what follows it.
    assert light.versions() == [None, None]
    controller.replace(light.engines[1])
    succeed(light, controller, 157)
    controller.close()


def test_a_raise_while_declaring_is_one_error_before_any_world_stands(light, controller):
    light.arm(light.trainers[0], Planned("raise", "manifest"))
    light.fill(170)
    with pytest.raises(RefitError, match="declare failed on 1 of 5 ranks") as failed:
        controller.refit(170)
    assert list(failed.value.causes) == ["rank 0 (trainer 0)"]
    assert controller.generation == 0
    succeed(light, controller, 171)
