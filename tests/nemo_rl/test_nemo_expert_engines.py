"""Stacked experts of stock FSDP2 trainers to a stock engine that spreads its experts over two workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stand_ins.models import write_expert_model
from stand_ins.observed import ObservedWorld, assert_same
from stand_ins.recipe import Recipe


@pytest.fixture(scope="module")
def world(cluster: None, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedWorld]:
    model = write_expert_model(tmp_path_factory.mktemp("model"))
    spread = {"policy.generation.vllm_cfg.expert_parallel_size": 2}
    started = ObservedWorld(Recipe(model, num_trainers=2, engine_tp=2, others=spread), checkout)
    yield started
    started.stop()


@pytest.mark.parametrize("backend", ["reshard", "gather_broadcast", "nemo_rl"])
def test_two_refits_leave_what_the_stock_loader_would(world: ObservedWorld, backend: str) -> None:
    """B19: one tensor holds all experts, and each worker of the engine takes its own."""
    world.attach(backend=backend)
    for factor in (-1.25, 1.5):
        world.change_weights(factor)
        found = world.refit_on_nothing()
        assert_same(found, world.stock_parameters())
