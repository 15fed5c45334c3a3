"""Tied fp32 masters, FSDP2 over tensor parallel, to a stock asynchronous bf16 engine of two workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nemo_rl.utils.timer import Timer
from stand_ins import in_actors
from stand_ins.models import write_model
from stand_ins.observed import ObservedWorld, assert_same
from stand_ins.recipe import Recipe

from nemo_rl_reshard.errors import RefitError

BACKENDS = ("reshard", "gather_broadcast", "nemo_rl")


@pytest.fixture(scope="module")
def world(cluster: None, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedWorld]:
    model = write_model(tmp_path_factory.mktemp("model"), tied=True)
    recipe = Recipe(
        model, num_trainers=4, trainer_tp=2, num_engines=1, engine_tp=2, is_async=True, precision="bfloat16"
    )
    started = ObservedWorld(recipe, checkout)
    yield started
    started.stop()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_refits_leave_what_the_stock_loader_would(world: ObservedWorld, backend: str) -> None:
    """B67: what synchronous engines do, asynchronous ones do."""
    world.attach(backend=backend)
    for factor in (-1.25, 1.5):
        world.change_weights(factor)
        found = world.refit_on_nothing()
        assert {tensor.dtype for worker in found for tensor in worker.values()} == {torch.bfloat16}
        assert_same(found, world.stock_parameters())


def test_every_tensor_directly_and_verified_leaves_the_same(world: ObservedWorld) -> None:
    attached = world.attach(backend="reshard", route="all", verify="full")
    assert attached is not None
    world.change_weights(0.7)
    timer = Timer()
    found = world.refit_on_nothing(timer)
    assert_same(found, world.stock_parameters())
    assert "prepare_for_generation/transfer_and_update_weights/reshard_verify" in timer.get_timing_metrics()


def test_buckets_smaller_than_the_embedding_leave_the_same(world: ObservedWorld) -> None:
    """vLLM's loader refuses a tied head that comes without its embedding; NeMo RL's own refit then fails."""
    world.attach(backend="gather_broadcast", bucket_bytes=16 << 10, message_bytes=16 << 10)
    world.change_weights(-0.9)
    assert_same(world.refit_on_nothing(), world.stock_parameters())


def test_a_killed_trainer_is_one_named_error_in_bounded_time_and_the_loops_shutdown_survives_it(
    world: ObservedWorld,
) -> None:
    """B61, B62. Last in this file: the trainer does not come back."""
    attached = world.attach(backend="reshard", on_failure="fall_back")
    assert attached is not None
    world.refit()
    os.kill(world.on_trainers(in_actors.process_id)[2], signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(RefitError, match="policy worker 2"):
        world.refit()
    assert time.monotonic() - start_s < 120
    with pytest.raises(RefitError), attached:
        pass
    assert world.generation.shutdown()
    attached.shutdown()
    assert world.on_engines(in_actors.process_id) == []
