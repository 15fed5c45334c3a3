"""The synchronizer in other processes: NeMo RL's single controller, its collector, workers without the package."""

import subprocess
import sys
from pathlib import Path

import pytest
import ray
from equipment.nemo_controllers import ActorArgs, Collector, Original, SingleController, WithoutPackage
from equipment.nemo_fakes import NUM_TRAINERS, FakeCluster, NemoWorld

import nemo_rl_reshard
from nemo_rl_reshard.errors import ConfigError, StateError
from nemo_rl_reshard.integrations.nemo_rl.attach import attach, attach_single_controller

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def world(cluster, tmp_path_factory):
    made = NemoWorld(str(tmp_path_factory.mktemp("store") / "store"), is_async=True)
    yield made
    made.stop()


def actor_args(world, original):
    return ActorArgs(world.policy, world.generation, *world.clusters, original)


def test_the_single_controller_refits_from_its_own_process(world):
    args = actor_args(world, Original())
    made = attach_single_controller(args, world.config())
    assert args.weight_synchronizer is made
    assert world.generation.weight_synchronizer is None
    controller = ray.remote(num_cpus=0)(SingleController).remote(args)
    for owner in world.generation.owners:  # requests go on in flight
        ray.get(owner.have_requests.remote(3), timeout=30)
    for version in (1, 2):
        world.fill(version)
        assert ray.get(controller.sync.remote(), timeout=60)["version"] == version
        world.assert_holds(version)
    ray.get(controller.stop.remote(), timeout=60)
    made.shutdown()
    for owner in world.generation.owners:
        ray.get(owner.have_requests.remote(0), timeout=30)


def test_the_single_controller_falls_back_to_what_it_had(world):
    args = actor_args(world, Original())
    attach_single_controller(args, world.config(on_failure="fall_back"))
    controller = ray.remote(num_cpus=0)(SingleController).remote(args)
    world.fill(3)
    ray.get(controller.sync.remote(), timeout=60)
    world.assert_holds(3)
    ray.get(world.policy.worker_group.workers[0].lose_plan.remote(), timeout=30)
    for _ in range(2):
        assert ray.get(controller.sync.remote(), timeout=60) == {}
    original = ray.get(controller.__ray_call__.remote(lambda self: self.synchronizer._own_refit.original.timers))
    assert original == [None, None]


def test_a_copy_that_never_refits_touches_no_actor(world):
    """The asynchronous loop hands its collector a copy of the generation, which shuts down when it is collected."""
    made = attach(world.policy, world.generation, world.clusters, world.config(on_failure="fall_back"))
    world.fill(4)
    made.sync_weights()
    calls = [state["calls"] for state in world.states()]
    collector = ray.remote(num_cpus=0)(Collector).remote(world.generation)
    ray.get(collector.drop.remote(), timeout=60)
    assert [state["calls"] for state in world.states()] == calls
    world.fill(5)
    made.sync_weights()
    world.assert_holds(5)
    assert made._controller.generation == 1, "the world still stands"
    world.generation.shutdown()
    world.generation.weight_synchronizer = None


def test_workers_that_cannot_import_the_package_are_one_error_that_says_what_to_do(world, monkeypatch):
    actor = ray.remote(num_cpus=0)(WithoutPackage)
    workers = [actor.remote(rank) for rank in range(NUM_TRAINERS)]
    engine = actor.remote(0)
    monkeypatch.setattr(world.policy.worker_group, "workers", workers)
    monkeypatch.setattr(world.generation.worker_group, "workers", [engine])
    monkeypatch.setattr(world.generation.worker_group, "dp_leader_worker_indices", [0])
    monkeypatch.setattr(world.generation, "tp_size", 1)
    clusters = (FakeCluster(NUM_TRAINERS), FakeCluster(1))
    with pytest.raises(ConfigError, match="3 faults") as failed:
        attach(world.policy, world.generation, clusters, world.config())
    lines = str(failed.value).splitlines()
    assert len(lines) == 4
    for line in lines[1:]:
        assert "cannot import this package (No module named 'nemo_rl_reshard" in line
        assert f"put {Path(nemo_rl_reshard.__file__).parents[1]} on PYTHONPATH before NeMo RL starts Ray" in line


SCRIPT = """
import sys, uuid
import ray
from equipment.nemo_fakes import NemoWorld
from nemo_rl_reshard.integrations.nemo_rl.attach import attach

ray.init(num_cpus=8, include_dashboard=False, namespace=uuid.uuid4().hex, object_store_memory=200 << 20,
         log_to_driver=False, logging_level="error", runtime_env={"env_vars": {"PYTHONPATH": ":".join(sys.path[:2])}})
world = NemoWorld(sys.argv[1], is_async=False)
attach(world.policy, world.generation, world.clusters, world.config())
world.fill(1)
world.generation.weight_synchronizer.sync_weights()
world.assert_holds(1)
if sys.argv[2] == "ray first":
    ray.shutdown()
    world.generation.shutdown()
    assert not ray.is_initialized(), "nothing may start a cluster again"
print("refitted")
"""


@pytest.mark.parametrize("ending", ["interpreter first", "ray first"])
def test_the_interpreter_ends_quietly_without_a_shutdown(tmp_path, ending):
    """`VllmGeneration.__del__` shuts the synchronizer down while Python and Ray end."""
    tests = Path(__file__).parents[1]
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path[:0] = [{str(tests)!r}, {str(tests.parent)!r}]\n{SCRIPT}")
    command = [sys.executable, str(script), str(tmp_path / "store"), ending]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "refitted" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Error during policy shutdown" not in done.stderr


def test_a_handle_is_not_used_once_ray_is_shut_down(world, monkeypatch):
    """It would start a cluster of its own."""
    made = attach(world.policy, world.generation, world.clusters, world.config())
    with monkeypatch.context() as patched:
        patched.setattr(ray, "is_initialized", lambda: False)
        made.leave()
        with pytest.raises(StateError, match="Ray is shut down"):
            made._trainers[0].submit("declare", [])
    world.generation.shutdown()
