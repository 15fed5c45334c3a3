"""B15: actors with coroutines, as NeMo RL's trainers are, run queued calls in any order; no refit depends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray
from equipment.ray_coroutines import CoroutineWorld, Driver
from equipment.ray_light import NUM_TRAINERS, LightWorld

from nemo_rl_reshard.config import RefitConfig
from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.runtime.order import VerifyMode

pytestmark = pytest.mark.ray


@pytest.fixture
def world(cluster: None) -> Iterator[CoroutineWorld]:
    made = CoroutineWorld()
    yield made
    made.stop()


def refit(world: LightWorld, controller: RefitController, version: int) -> None:
    world.fill(version)
    controller.refit(version, verify=VerifyMode.FULL)
    world.assert_serves(version)


@pytest.mark.parametrize("held", ["declare", "connect", "adopt", "refit", "close"])
def test_b15_a_call_that_was_given_up_and_runs_late_is_refused(world: CoroutineWorld, held: str) -> None:
    """It stays queued, the driver gives it up, what the driver sent after it runs before it, a new world is built."""
    controller = world.controller(deadline_s=1.0, grace_s=1.0, setup_s=1.0)
    if held in ("refit", "close"):
        refit(world, controller, 1)
    world.hold(held)
    if held == "close":
        controller.close()  # waits for the grace, and loses nobody who is only slow
    else:
        world.fill(2)
        with pytest.raises(RefitError, match=f"{held} failed") as failed:
            controller.refit(2)
        assert list(failed.value.causes) == ["rank 1 (trainer 1)"]
        assert controller.lost == {"trainer 1"}
        controller.replace(world.trainers[1])
    world.trainers[1].held.clear()
    again = world.controller(deadline_s=20.0, grace_s=5.0)
    refit(world, again, 3)
    (late,) = world.let_go()
    if held == "close":
        assert late.fault is None, "not obeyed, and no reason to complain"
    else:
        assert "StateError" in str(late.fault)
        assert "epoch" in str(late.fault)
    refit(world, again, 4)
    assert again.generation == 1, "the world stood all the time"
    again.close()


def test_b15_a_late_call_does_not_start_when_no_newer_world_stands_either(world: CoroutineWorld) -> None:
    controller = world.controller(deadline_s=1.0, grace_s=1.0)
    refit(world, controller, 1)
    world.hold("refit")
    with pytest.raises(RefitError):
        controller.refit(2)
    (late,) = world.let_go()
    assert "has left epoch" in str(late.fault)
    controller.replace(world.trainers[1])
    refit(world, controller, 3)
    controller.close()


def test_another_process_carries_on_and_the_first_cannot_disturb_it(world: CoroutineWorld) -> None:
    first = world.controller()
    assert first.epoch == 0
    refit(world, first, 1)
    config = RefitConfig.read({"route": "all", "deadline_s": 6, "grace_s": 5, "setup_s": 60})
    ahead = first.epoch + 10**9  # as if the clock there were behind
    second = ray.remote(num_cpus=0)(Driver).remote(world.trainers, world.engines, config, ahead)
    world.fill(2)
    assert ray.get(second.refit.remote(2), timeout=60) == (ahead + 1, 1)
    world.assert_serves(2)
    world.fill(3)
    with pytest.raises(RefitError, match="stands in epoch") as failed:
        first.refit(3)
    assert failed.value.before_first_write
    assert len(failed.value.causes) == NUM_TRAINERS + len(world.engines)
    first.close()
    assert ray.get(second.refit.remote(3), timeout=60) == (ahead + 1, 1), "in the same world"
    world.assert_serves(3)
    ray.get(second.close.remote(), timeout=60)
