"""Sharded trainers to live vLLM engines under Ray: bit-equal parameters, the tokens of a fresh engine, real faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from equipment.ray_engines import EngineMember
from equipment.ray_faults import Planned
from equipment.ray_trainers import TrainerGroup

from nemo_rl_reshard.config import Backend, RefitConfig
from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.runtime.order import VerifyMode

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(600)]

Save = Callable[[TrainerGroup], Path]

DEADLINE_S, GRACE_S = 20.0, 15.0
STRUCK = "model.layers.1.mlp.down_proj.weight"
"""A tensor late in the model: when its memory is asked for, others are already under way."""


@pytest.fixture(scope="module")
def controller(trainer_group: TrainerGroup, engines: list[EngineMember]):
    config = RefitConfig.read({"route": "all", "deadline_s": DEADLINE_S, "grace_s": GRACE_S})
    made = RefitController(trainer_group.members, [engine.member for engine in engines], config)
    yield made
    made.close()


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Writes the trainers' gathered weights as a checkpoint; its folder."""
    return lambda trainers: trainers.save(tmp_path_factory.mktemp("gathered") / "weights")


@pytest.fixture(scope="module")
def fresh(cluster: None, save: Save):
    """Digests and tokens of an engine freshly started from the trainers' gathered weights, with `tp` workers."""

    def start(trainers: TrainerGroup, tp: int) -> tuple[list[dict[str, str]], list[list[int]]]:
        engine = EngineMember("reference", save(trainers), tp)
        try:
            ray.get(engine.actor.serve_checkpoint.remote(), timeout=200)
            return engine.digests(), engine.tokens()
        finally:
            engine.stop()

    return start


def assert_serve_the_same(engines: list[EngineMember], references: dict[int, tuple]) -> None:
    for engine in engines:
        digests, tokens = references[engine.member.num_ranks]
        assert engine.digests() == digests, f"{engine.member.name}: parameters differ from gather-then-slice"
        assert engine.tokens() == tokens, f"{engine.member.name}: tokens differ from a fresh engine's"


def test_two_refits_equal_a_fresh_engine_with_either_backend(trainer_group, engines, controller, fresh):
    before = [engine.digests() for engine in engines]
    for engine in engines:
        with pytest.raises(ray.exceptions.RayTaskError, match="no refit has succeeded since it started"):
            engine.tokens()
    first = controller.refit(0, verify=VerifyMode.FULL)
    assert first.direct_share == 1.0
    tokens = [engine.tokens() for engine in engines]
    held = [engine.digests() for engine in engines]
    assert all(old != new for old, new in zip(before, held, strict=True))

    trainer_group.train(1)
    report = controller.refit(1, verify=VerifyMode.FULL)
    assert (controller.num_plans, controller.generation, report.version) == (1, 1, 1)
    assert [engine.version() for engine in engines] == [1, 1]
    references = {tp: fresh(trainer_group, tp) for tp in (1, 2)}
    assert_serve_the_same(engines, references)
    assert tokens != [engine.tokens() for engine in engines], "training changed what is generated"

    # The same weights by the other way: moved away first, so that nothing is right by accident.
    trainer_group.train(2)
    controller.refit(2, backend=Backend.GATHER_BROADCAST, verify=VerifyMode.FULL)
    conventional = [engine.digests() for engine in engines]
    assert conventional != [references[1][0], references[2][0]]
    controller.refit(3, backend=Backend.RESHARD)
    assert [engine.digests() for engine in engines] == conventional
    assert (controller.num_plans, controller.generation) == (2, 1)


def test_b61_a_killed_inference_actor_is_replaced_and_the_next_refit_is_right(
    trainer_group: TrainerGroup,
    engines: list[EngineMember],
    controller: RefitController,
    foreign_checkpoint: Path,
    save: Save,
):
    (process,) = ray.get(engines[0].actor.processes.remote())
    error = fail(trainer_group, controller, Planned("kill", STRUCK, pid=process["pid"]))
    assert list(error.causes) == ["rank 4 (engine 0)"]
    assert controller.lost == {"engine 0"}
    with pytest.raises(ray.exceptions.RayTaskError, match="a refit failed and none has succeeded since"):
        engines[1].tokens()
    engines[0] = EngineMember("engine 0", foreign_checkpoint, tp=1)
    controller.replace(engines[0].member)
    refit_and_compare(trainer_group, engines, controller, save, 10)


def test_b61_a_killed_worker_of_an_engine_is_named_and_its_engine_replaced(
    trainer_group: TrainerGroup,
    engines: list[EngineMember],
    controller: RefitController,
    foreign_checkpoint: Path,
    save: Save,
):
    second = ray.get(engines[1].actor.processes.remote())[1]
    error = fail(trainer_group, controller, Planned("kill", STRUCK, pid=second["pid"]))
    assert list(error.causes) == ["rank 6 (engine 1 worker 1)"]
    assert f"process {second['pid']} ended with exit code -9" in error.causes["rank 6 (engine 1 worker 1)"]
    assert "rank 5 (engine 1 worker 0)" in error.waiting
    assert controller.lost == {"engine 1"}
    engines[1].stop()
    engines[1] = EngineMember("engine 1", foreign_checkpoint, tp=2)
    controller.replace(engines[1].member)
    refit_and_compare(trainer_group, engines, controller, save, 20)


def test_a_killed_trainer_group_restarts_from_its_checkpoint_and_the_next_refit_is_right(
    trainer_group: TrainerGroup, engines: list[EngineMember], controller: RefitController, save: Save
):
    last = save(trainer_group)
    num_plans = controller.num_plans
    error = fail(trainer_group, controller, Planned("kill", STRUCK))
    assert list(error.causes) == ["rank 1 (trainer 1)"]
    assert controller.lost == {"trainer 1"}
    trainer_group.restart(last)
    controller.replace_trainers(trainer_group.members)
    controller.refit(30, verify=VerifyMode.FULL)
    for engine in engines:
        assert engine.digests() == engine.gathered_and_sliced(last), engine.member.name
    refit_and_compare(trainer_group, engines, controller, save, 31)
    assert controller.num_plans == num_plans, "the restarted group declares the same layout: the plan is kept"


def test_b63_b64_a_sleeping_engine_is_not_refitted_and_lost_weights_need_a_full_refit(
    trainer_group: TrainerGroup, engines: list[EngineMember], controller: RefitController
):
    controller.refit(40)
    sleeper = engines[0].actor
    ray.get(sleeper.sleep.remote(2), timeout=60)
    with pytest.raises(RefitError, match="asleep, its weights are not in place") as failed:
        controller.refit(41)
    assert list(failed.value.causes) == ["rank 4 (engine 0)"]
    ray.get(sleeper.wake_up.remote(), timeout=60)
    with pytest.raises(ray.exceptions.RayTaskError, match="no usable weights"):
        engines[0].tokens()
    controller.refit(42)
    assert [engine.version() for engine in engines] == [42, 42]
    assert engines[0].tokens()


def fail(trainers: TrainerGroup, controller: RefitController, fault: Planned) -> RefitError:
    """A refit in which trainer 1 strikes `fault`; it must fail in time."""
    ray.get(trainers.actors[1].arm.remote(fault))
    controller.close()  # the next world takes the fault along
    controller.plan()
    start_s = time.monotonic()
    with pytest.raises(RefitError) as failed:
        controller.refit(100)
    assert time.monotonic() - start_s < DEADLINE_S + 3 * GRACE_S
    return failed.value


def refit_and_compare(
    trainers: TrainerGroup, engines: list[EngineMember], controller: RefitController, save: Save, step: int
) -> None:
    """Two refits after training; every engine then holds what its own loader makes of the gathered weights."""
    for version in (step, step + 1):
        trainers.train(version)
        report = controller.refit(version, verify=VerifyMode.FULL)
        assert [engine.version() for engine in engines] == [version, version]
        assert sum(rank.num_verified for rank in report.ranks) > 0
    gathered = save(trainers)
    for engine in engines:
        assert engine.digests() == engine.gathered_and_sliced(gathered), engine.member.name
