"""One Ray cluster for the whole tier: starting it costs as much as a test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from equipment.ray_light import LightWorld

from nemo_rl_reshard.orchestration.cpu_environment import CpuEnvironment

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folders = [REPOSITORY, REPOSITORY / "tests", REPOSITORY / "examples" / "cpu_engine"]
    environment = CpuEnvironment(python_path=folders)
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        namespace=f"reshard-{uuid.uuid4().hex}",
        object_store_memory=200 << 20,
        runtime_env=environment.runtime_env(),
        logging_level="warning",
        log_to_driver=bool(os.environ.get("RESHARD_TEST_LOGS")),
        # Unix sockets have short names, pytest's folders long ones: Ray picks its own.
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def light(cluster: None) -> Iterator[LightWorld]:
    world = LightWorld()
    world.fill(0)
    yield world
    world.stop()
