"""One Ray cluster for the whole tier: starting it costs as much as a test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from equipment.ray_engines import EngineMember
from equipment.ray_light import LightWorld
from equipment.ray_model import write_checkpoint
from equipment.ray_trainers import TrainerGroup

from nemo_rl_reshard.orchestration.cpu_environment import CpuEnvironment

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    folders = [REPOSITORY, REPOSITORY / "tests", REPOSITORY / "examples" / "cpu_engine"]
    environment = CpuEnvironment(python_path=folders, others={"CPU_ENGINE_LIVE_WEIGHTS": "1"})
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        namespace=f"reshard-{uuid.uuid4().hex}",
        object_store_memory=200 << 20,
        runtime_env=environment.runtime_env(),
        logging_level="warning",
        log_to_driver=bool(os.environ.get("RESHARD_TEST_LOGS")),
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What trainers start from."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "seed0", seed=0)


@pytest.fixture(scope="session")
def foreign_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What engines start from: same model, other weights."""
    return write_checkpoint(tmp_path_factory.mktemp("model") / "seed1", seed=1)


@pytest.fixture(scope="session")
def trainer_group(cluster: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerGroup]:
    group = TrainerGroup(tmp_path_factory.mktemp("stores"), checkpoint)
    yield group
    group.stop()


@pytest.fixture(scope="session")
def engines(cluster: None, foreign_checkpoint: Path) -> Iterator[list[EngineMember]]:
    """One engine of one worker, one of two. A test that breaks one puts another in its place in this list."""
    started = [EngineMember("engine 0", foreign_checkpoint, tp=1), EngineMember("engine 1", foreign_checkpoint, tp=2)]
    yield started
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def light(cluster: None) -> Iterator[LightWorld]:
    world = LightWorld()
    world.fill(0)
    yield world
    world.stop()
