"""Stock FSDP2 trainers and stock synchronous engines: every value of refit.backend, and what a failure leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from nemo_rl.algorithms.single_controller_utils.setup import SingleControllerActorArgs
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.interfaces import WeightSynchronizer
from stand_ins import in_actors
from stand_ins.models import write_model
from stand_ins.observed import ObservedWorld, assert_same, assert_two_refits_are_stock
from stand_ins.recipe import Recipe

from nemo_rl_reshard.errors import RefitError, StateError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach_single_controller

LABEL = "prepare_for_generation/transfer_and_update_weights"
BACKENDS = ("reshard", "gather_broadcast", "nemo_rl")


@pytest.fixture(scope="module")
def world(cluster: None, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedWorld]:
    model = write_model(tmp_path_factory.mktemp("model"))
    started = ObservedWorld(Recipe(model, num_trainers=2, num_engines=2), checkout)
    yield started
    started.stop()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_refits_leave_what_the_stock_loader_would(world: ObservedWorld, backend: str) -> None:
    """B13, B14: two engines that each count their workers from 0, and trainers by their place in the group."""
    assert_two_refits_are_stock(world, backend)


def test_the_three_backends_leave_bit_equal_engines(world: ObservedWorld) -> None:
    world.change_weights(0.75)
    left = {}
    for backend in BACKENDS:
        world.attach(backend=backend)
        left[backend] = world.refit_on_nothing()
    assert_same(left["reshard"], left["nemo_rl"])
    assert_same(left["gather_broadcast"], left["nemo_rl"])


def test_timer_and_caller_get_what_the_loop_logs(world: ObservedWorld) -> None:
    attached = world.attach(backend="reshard")
    assert isinstance(attached, WeightSynchronizer)
    assert attached.is_stale
    timer = Timer()
    scalars = world.refit(timer)
    assert not attached.is_stale
    assert all(type(value) is float for value in scalars.values())
    assert not any(name.startswith("refit/") for name in scalars)
    labels = timer.get_timing_metrics()
    assert labels[LABEL] > 0
    assert any(name.startswith(f"{LABEL}/reshard_") for name in labels)


def test_a_generated_answer_is_the_new_weights_answer(world: ObservedWorld) -> None:
    """B66: keys and values that the old weights computed are not used."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    world.attach(backend="reshard")
    prompt = torch.arange(2, 34).reshape(2, 16)
    asked = BatchedDataDict({"input_ids": prompt, "input_lengths": torch.full((2,), 16)})
    world.refit()
    before = world.generation.generate(asked, greedy=True)
    world.change_weights(-1.5)
    world.refit()
    after = world.generation.generate(asked, greedy=True)
    assert not torch.equal(before["logprobs"], after["logprobs"])
    world.stock_parameters()
    world.generation.finish_generation()
    fresh = world.generation.generate(asked, greedy=True)
    assert torch.equal(after["output_ids"], fresh["output_ids"])
    assert torch.equal(after["logprobs"], fresh["logprobs"])


def test_a_controller_in_an_actor_refits_without_a_timer_from_a_thread(world: ObservedWorld) -> None:
    """The single controller replaces the field, travels into an actor and calls from `asyncio.to_thread`."""

    class Controller:
        def __init__(self, arguments: SingleControllerActorArgs) -> None:
            self._synchronizer = arguments.weight_synchronizer

        async def refit(self) -> bool:
            await asyncio.to_thread(self._synchronizer.sync_weights, kv_scales=None)
            return bool(self._synchronizer.is_stale)

        def shutdown(self) -> None:
            self._synchronizer.shutdown()

    world.attach(backend="nemo_rl")
    empty: dict[str, Any] = dict.fromkeys(each.name for each in dataclasses.fields(SingleControllerActorArgs))
    train_cluster, inference_cluster = world.parts.clusters
    arguments = SingleControllerActorArgs(
        **{
            **empty,
            "gen_handle": world.generation,
            "trainer_handle": world.parts.policy,
            "train_cluster": train_cluster,
            "inference_cluster": inference_cluster,
        }
    )
    made = attach_single_controller(arguments, world.parts.config.model_copy(update={"refit": {"backend": "reshard"}}))
    assert arguments.weight_synchronizer is made
    world.on_engines(in_actors.forget_parameters)
    # Handles that own the workers would shut them down when the actor forgets them.
    travelling = dataclasses.replace(
        arguments, gen_handle=None, trainer_handle=None, train_cluster=None, inference_cluster=None
    )
    controller = ray.remote(num_cpus=0)(Controller).remote(travelling)
    assert ray.get(controller.refit.remote(), timeout=120) is False
    assert_same(world.parameters(), world.stock_parameters())
    ray.get(controller.shutdown.remote(), timeout=60)
    ray.kill(controller)


def test_before_the_first_write_nemo_rls_own_refit_takes_over(world: ObservedWorld) -> None:
    attached = world.attach(backend="reshard", on_failure="fall_back")
    assert attached is not None
    world.change_weights(1.25)
    world.on_engines(in_actors.forget_parameters)
    _on_one_trainer(world, in_actors.leave_world)
    world.refit()
    assert world.generation.weight_synchronizer is None
    assert_same(world.parameters(), world.stock_parameters())


def test_without_fall_back_the_same_failure_is_raised(world: ObservedWorld) -> None:
    attached = world.attach(backend="reshard")
    assert attached is not None
    _on_one_trainer(world, in_actors.leave_world)
    with pytest.raises(RefitError) as raised:
        world.refit()
    assert raised.value.before_first_write
    assert attached.is_stale
    with pytest.raises(RefitError):
        attached.raise_if_failed()


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_worker_that_raises_amid_a_refit_fails_it_loudly_and_the_next_refit_heals(
    world: ObservedWorld, side: str
) -> None:
    """B62, B63: raised where NeMo RL's loop sees it, and nothing of the failed refit is left in the next."""
    attached = world.attach(backend="reshard", route="all", on_failure="fall_back")
    tensor = "model.layers.1.mlp.down_proj.weight"
    if side == "trainer":
        _on_one_trainer(world, in_actors.plan_fault, "raise", tensor)
    else:
        world.on_engines(in_actors.plan_fault, "raise", tensor)
    start_s = time.monotonic()
    with pytest.raises(RefitError, match=f"planned to fail at {tensor}") as raised:
        world.refit()
    assert time.monotonic() - start_s < 60
    # What was begun may be half written: nobody may pretend otherwise by falling back.
    assert not raised.value.before_first_write
    assert world.generation.weight_synchronizer is attached
    world.change_weights(-0.8)
    assert_same(world.refit_on_nothing(), world.stock_parameters())


def test_shutdown_runs_twice_and_refuses_afterwards(world: ObservedWorld) -> None:
    attached = world.attach(backend="reshard")
    assert attached is not None
    attached.shutdown()
    attached.shutdown()
    with pytest.raises(StateError):
        world.refit()


def test_a_killed_engine_is_one_named_error_in_bounded_time_and_shutdown_survives_it(world: ObservedWorld) -> None:
    """B61. Last in this file: the engine does not come back."""
    attached = world.attach(backend="reshard")
    assert attached is not None
    world.refit()
    victim = world.on_engines(in_actors.process_id)[1][0]
    os.kill(victim, signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(RefitError, match="engine 1"):
        world.refit()
    assert time.monotonic() - start_s < 120
    with pytest.raises(RefitError):
        attached.raise_if_failed()
    attached.shutdown()
    world.generation.shutdown()
    world.generation.shutdown()


def _on_one_trainer(world: ObservedWorld, function: Any, *arguments: Any) -> None:
    worker = world.parts.policy.worker_group.workers[1]
    ray.get(worker.__ray_call__.remote(function, *arguments), timeout=60)
