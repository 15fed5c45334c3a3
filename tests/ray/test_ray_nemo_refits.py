"""Refits of NeMo RL's actors, as fakes, through the synchronizer that `attach` makes: both kinds of engine."""

import asyncio
import logging

import pytest
import ray
from equipment.nemo_fakes import GATE, NUM_TRAINERS, FakeTimer, NemoWorld, refit_policy_generation

from nemo_rl_reshard.errors import RefitError, StateError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach
from nemo_rl_reshard.integrations.nemo_rl.policy_rank import perform_on_policy

pytestmark = pytest.mark.ray
LABEL = "prepare_for_generation/transfer_and_update_weights"
PHASES = ("declare", "pack", "network", "exchange", "leftover", "install", "verify")
IN_FLIGHT = {"async_grpo": {"enabled": True, "in_flight_weight_updates": True}}


@pytest.fixture(scope="module", params=["sync", "async"])
def world(request, cluster, tmp_path_factory):
    made = NemoWorld(str(tmp_path_factory.mktemp("store") / "store"), is_async=request.param == "async")
    yield made
    made.stop()


@pytest.fixture
def attached(world):
    made = attach(world.policy, world.generation, world.clusters, world.config(verify="full"))
    yield made
    world.generation.shutdown()
    world.generation.weight_synchronizer = None


def refit(world, version, timer=None):
    world.fill(version)
    numbers = refit_policy_generation(world.policy, world.generation, False, timer=timer)
    world.assert_holds(version)
    return numbers


def test_two_refits_through_nemo_rls_own_function_are_bit_equal_b13_b14(world, attached):
    """Two engines of two workers, every worker counted from 0 in its own executor; owners alone are called."""
    assert attached.is_stale
    for version in (1, 2):
        timer = FakeTimer()
        numbers = refit(world, version, timer)
        assert not attached.is_stale
        assert numbers["version"] == version
        assert all(type(value) is float for value in numbers.values())
        expected = {"seconds", "direct_share", "fraction_of_floor", *(f"seconds_{phase}" for phase in PHASES)}
        assert expected <= set(numbers)
        assert set(timer.recorded) == {LABEL, *(f"{LABEL}/reshard_{phase}" for phase in PHASES)}


def test_gather_and_broadcast_gives_the_same_weights(world):
    config = world.config(backend="gather_broadcast")
    with attach(world.policy, world.generation, world.clusters, config):
        for version in (3, 4):
            assert refit(world, version)["direct_share"] == 0.0
    world.generation.shutdown()


def test_worker_classes_of_ones_own_are_used_where_no_function_can_be_run(cluster, tmp_path):
    """The documented fallback: every request by the name of a method, on both sides."""
    named = NemoWorld(str(tmp_path / "store"), is_async=False, by_name=True)
    attached = attach(named.policy, named.generation, named.clusters, named.config())
    assert all(member.has_methods for member in attached._trainers)
    assert all(member.by_name for member in attached._engines)
    for version in (1, 2):
        refit(named, version)
    named.generation.shutdown()
    named.stop()


def test_backend_nemo_rl_touches_nothing(world):
    before = world.generation.weight_synchronizer
    calls = [state["calls"] for state in world.states()]
    assert attach(world.policy, world.generation, world.clusters, world.config(backend="nemo_rl")) is None
    assert world.generation.weight_synchronizer is before
    assert [state["calls"] for state in world.states()] == calls


def test_refits_from_other_threads_and_without_a_timer(world, attached):
    """The single controller calls through `asyncio.to_thread`, a new thread each time, and never passes a timer."""

    async def loop():
        for version in (5, 6):
            world.fill(version)
            numbers = await asyncio.to_thread(attached.sync_weights, kv_scales=None)
            assert numbers["seconds"] > 0
            world.assert_holds(version)

    asyncio.run(loop())
    timer = FakeTimer()
    world.fill(7)
    asyncio.run(asyncio.to_thread(attached.sync_weights, timer=timer))
    assert not timer.running
    world.assert_holds(7)


def test_two_threads_at_once_wait_for_each_other(world, attached):
    world.fill(8)

    async def both():
        return await asyncio.gather(*(asyncio.to_thread(attached.sync_weights) for _ in range(2)))

    versions = sorted(numbers["version"] for numbers in asyncio.run(both()))
    assert versions == [1.0, 2.0]
    world.assert_holds(8)


def test_b66_prefix_caches_are_dropped_unless_updates_are_in_flight(world, attached):
    warm = lambda: ray.get([owner.warm_cache.remote() for owner in world.generation.owners], timeout=30)  # noqa: E731
    warm()
    refit(world, 9)
    assert [(state["cache"], state["encoder"]) for state in world.states()] == [([], []), ([], [])]
    warm()
    attach(world.policy, world.generation, world.clusters, world.config(grpo=IN_FLIGHT))
    refit(world, 10)
    kept = [] if not world.is_async else ["filled since"]
    assert [state["cache"] for state in world.states()] == [kept, kept]
    assert [state["encoder"] for state in world.states()] == [[], []], "as NeMo RL's own refits do"


def test_b65_engines_are_found_idle_before_and_after(world, attached):
    owner = world.generation.owners[1]
    refit(world, 11)
    ray.get(owner.have_requests.remote(2, 1, 0), timeout=30)
    refit(world, 12)  # requests that end by themselves are waited for
    for counts, message, unwritten in (((3,), "not idle before the refit", True), ((0, 1), "during the refit", False)):
        ray.get(owner.have_requests.remote(*counts), timeout=30)
        world.fill(13)
        with pytest.raises(RefitError, match=message) as failed:
            attached.sync_weights()
        assert list(failed.value.causes) == ["engine 1"]
        assert failed.value.before_first_write is unwritten
        assert attached.is_stale
        if unwritten:
            world.assert_holds(12)
    ray.get(owner.have_requests.remote(0), timeout=30)
    refit(world, 14)


def test_b65_a_loop_that_updates_in_flight_may_refit_busy_engines(world):
    attached = attach(world.policy, world.generation, world.clusters, world.config(grpo=IN_FLIGHT))
    for owner in world.generation.owners:
        ray.get(owner.have_requests.remote(4), timeout=30)
    try:
        if world.is_async:
            refit(world, 15)
        else:
            with pytest.raises(RefitError, match="4 unfinished requests"):
                attached.sync_weights()
    finally:
        for owner in world.generation.owners:
            ray.get(owner.have_requests.remote(0), timeout=30)
        world.generation.shutdown()


def test_calls_that_come_late_or_out_of_order_change_nothing(world, attached):
    """Trainer actors run queued calls in any order: an old world's calls may run in the midst of a newer one."""
    refit(world, 16)
    old = attached._controller.epoch
    attached.leave()
    world.fill(17)
    late = []
    for rank, worker in enumerate(world.policy.worker_group.workers):
        for operation, more in (("close", {"failure": None}), ("declare", {"specs": None, "num_trainers": 2})):
            argument = {"rank": rank, "epoch": old, "answer_within_s": 5.0, **more}
            late.append((worker, operation, argument))
    attached.init_communicator()
    ordered = ray.get([w.__ray_call__.remote(perform_on_policy, o, [a]) for w, o, a in late], timeout=30)
    assert ["fault" in answer for (answer,) in ordered] == [False, True] * NUM_TRAINERS
    assert "StateError" in str(ordered[1])
    attached.sync_weights()
    world.assert_holds(17)


def test_attaching_anew_replaces_the_first_synchronizer_b15(world, attached):
    """The ranks serve the world that was built last, and an older synchronizer is told so."""
    refit(world, 18)
    newer = attach(world.policy, world.generation, world.clusters, world.config())
    assert world.generation.weight_synchronizer is newer
    with pytest.raises(StateError, match="was shut down"):
        attached.sync_weights()
    refit(world, 19)
    refit(world, 20)


def test_what_users_read_in_the_log(world, caplog):
    with caplog.at_level(logging.INFO, logger="nemo_rl_reshard"):
        attached = attach(world.policy, world.generation, world.clusters, world.config(route="ffn"))
        refit(world, 21)
    text = caplog.text
    assert "refit plan for reshard: 4 tensors" in text
    assert "leftover (not in a decoder layer): 2, such as model.norm.weight" in text
    assert "floor" in text
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("refit 1 by reshard")]
    assert len(lines) == 1
    assert GATE not in text
    assert set(attached.setup_metrics) == {"reshard_seams_time_s", "reshard_init_time_s"}
    assert all(seconds > 0 for seconds in attached.setup_metrics.values())
    world.generation.shutdown()
