"""Refits of NeMo RL's actors that fail: loud at once, bounded in time, and left to NeMo RL only before a write."""

import logging
import sys
import time
from contextlib import suppress
from types import ModuleType

import pytest
import ray
from equipment.nemo_fakes import GATE, TP, FakeTimer, NemoWorld, refit_policy_generation
from equipment.ray_faults import Planned

from nemo_rl_reshard.errors import ConfigError, RefitError, StateError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach

pytestmark = pytest.mark.ray
LABEL = "prepare_for_generation/transfer_and_update_weights"


@pytest.fixture(scope="module", params=["sync", "async"])
def world(request, cluster, tmp_path_factory):
    made = NemoWorld(str(tmp_path_factory.mktemp("store") / "store"), is_async=request.param == "async")
    yield made
    made.stop()


@pytest.fixture
def own_loop(monkeypatch):
    """NeMo RL's module with the refit to fall back to, where it would be imported from."""
    module = ModuleType("nemo_rl.algorithms.grpo")
    module.refit_policy_generation = refit_policy_generation
    for name in ("nemo_rl", "nemo_rl.algorithms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def attached(world, **section):
    made = attach(world.policy, world.generation, world.clusters, world.config(**section))
    assert made is world.generation.weight_synchronizer
    return made


def arm(world, tensor, kind="raise"):
    ray.get(world.generation.owners[1].arm.remote(1, Planned(kind, tensor)), timeout=30)


def kill(actor):
    """Return once the actor is gone: until then it may still answer."""
    ray.kill(actor)
    end_s = time.monotonic() + 30
    with suppress(ray.exceptions.RayActorError):
        while time.monotonic() < end_s:
            ray.get(actor.__ray_ready__.remote(), timeout=30)


def loop_that_prints(world):
    """The asynchronous loop's way with its first refit."""
    try:
        refit_policy_generation(world.policy, world.generation, False)
    except Exception as error:
        sys.stderr.write(f"Policy generation refit failed: {error}")


def test_b62_a_failure_is_loud_even_where_the_loop_prints_it_and_returns(world, caplog):
    arm(world, GATE)
    world.fill(1)
    synchronizer = attached(world)
    with pytest.raises(RuntimeError, match=f"planned to fail at {GATE}") as failed, synchronizer:
        loop_that_prints(world)
    assert isinstance(failed.value, RefitError)
    assert list(failed.value.causes) == ["rank 5 (engine 1 worker 1)"]
    assert not failed.value.before_first_write
    assert synchronizer.is_stale
    assert any(record.levelno == logging.ERROR and "rank 5" in record.getMessage() for record in caplog.records)
    with pytest.raises(RefitError):
        synchronizer.raise_if_failed()
    with pytest.raises(KeyError), synchronizer:  # what is on its way already goes first
        raise KeyError
    world.fill(2)
    with synchronizer:
        loop_that_prints(world)
        synchronizer.sync_weights()
    world.assert_holds(2)
    assert not synchronizer.is_stale
    world.generation.shutdown()


def test_key_value_scales_are_refused_by_name(world):
    synchronizer = attached(world, on_failure="fall_back")
    with pytest.raises(StateError, match="kv_cache_dtype"):
        synchronizer.sync_weights(kv_scales={})
    with pytest.raises(StateError):
        synchronizer.raise_if_failed()
    world.generation.shutdown()


def test_a_failure_before_the_first_write_is_left_to_nemo_rl(world, own_loop, caplog):
    synchronizer = attached(world, on_failure="fall_back")
    world.fill(3)
    refit_policy_generation(world.policy, world.generation, False)
    ray.get(world.policy.worker_group.workers[1].lose_plan.remote(), timeout=30)
    for version in (4, 5):
        world.fill(version)
        timer = FakeTimer()
        with synchronizer:
            assert refit_policy_generation(world.policy, world.generation, False, timer=timer) == {}
        world.assert_holds(version)
        assert world.generation.weight_synchronizer is None
        assert timer.recorded.keys() == {LABEL}
    assert not synchronizer.is_stale
    assert any(record.levelno == logging.WARNING and "fall_back" in record.getMessage() for record in caplog.records)


def test_a_failure_after_the_first_write_is_raised_whatever_was_asked_for(world, own_loop):
    arm(world, GATE)
    synchronizer = attached(world, on_failure="fall_back")
    world.fill(6)
    with pytest.raises(RefitError, match="planned to fail"):
        refit_policy_generation(world.policy, world.generation, False, timer=FakeTimer())
    assert world.generation.weight_synchronizer is synchronizer
    world.fill(7)
    refit_policy_generation(world.policy, world.generation, False, timer=FakeTimer())
    world.assert_holds(7)
    world.generation.shutdown()
    world.generation.weight_synchronizer = None


def test_setting_up_that_fails_is_raised_or_left_to_nemo_rl(world, own_loop):
    arm(world, "manifest")
    with pytest.raises(RefitError, match="planned to fail at manifest"):
        attached(world)
    assert world.generation.weight_synchronizer is None
    arm(world, "manifest")
    config = world.config(on_failure="fall_back")
    assert attach(world.policy, world.generation, world.clusters, config) is None
    world.fill(8)
    refit_policy_generation(world.policy, world.generation, False, timer=FakeTimer())
    world.assert_holds(8)


def test_b14_trainers_out_of_rank_order_and_wrong_sizes_are_named_together(world):
    workers = world.policy.worker_group.workers
    workers.reverse()
    world.generation.tp_size = TP - 1
    try:
        with pytest.raises(ConfigError, match="the inference cluster has 4 GPUs"):
            attached(world)
        world.generation.tp_size = TP
        with pytest.raises(ConfigError, match="policy worker 0 takes itself for rank 1") as failed:
            attached(world)
        assert "policy worker 1 takes itself for rank 0" in str(failed.value)
    finally:
        workers.reverse()
        world.generation.tp_size = TP


def test_b13_an_engine_with_other_workers_than_its_own_is_refused(world, monkeypatch):
    """Twice the workers, as if those of the next engine were counted in as well."""
    monkeypatch.setattr(world.generation, "tp_size", 2 * TP)
    monkeypatch.setattr(world.generation.worker_group, "dp_leader_worker_indices", [0])
    with pytest.raises(ConfigError, match=r"executor ranks \[0, 1\], expected \[0, 1, 2, 3\]"):
        attached(world)


def test_b61_a_dead_engine_is_named_and_shutting_down_twice_is_safe(world):
    """Last: it leaves the world broken."""
    synchronizer = attached(world, on_failure="fall_back")
    world.fill(9)
    synchronizer.sync_weights()
    kill(world.generation.owners[1])
    start_s = time.monotonic()
    with pytest.raises(RefitError, match="its actor is gone") as failed:
        synchronizer.sync_weights()
    assert list(failed.value.causes) == ["engine 1"]
    ray.kill(world.policy.worker_group.workers[0])
    assert world.generation.shutdown()
    synchronizer.shutdown()
    assert time.monotonic() - start_s < 30
    with pytest.raises(StateError, match="was shut down"):
        synchronizer.sync_weights()
