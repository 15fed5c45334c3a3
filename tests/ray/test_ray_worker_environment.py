"""A stock trainer actor in an environment of torch, numpy and Ray alone takes part in a refit's declaration. B71."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import ray
import torch
from equipment.worker_environment import build_worker_environment

from nemo_rl_reshard.integrations.nemo_rl.members import PolicyMember
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.params.manifest import Manifest, Side

pytestmark = pytest.mark.ray


@pytest.fixture
def interpreter(cluster: None, tmp_path: Path) -> Path:
    return build_worker_environment(tmp_path / "venv")


def stock_worker() -> type:
    """A class made in a function travels by value: its worker can import this package, and no test.

    Like NeMo RL's policy workers it is asynchronous, and knows nothing of refits.
    """

    class Worker:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(3, 2)
            self.dtype = torch.float32
            self.cpu_offload = False

        async def present(self, names: list[str]) -> list[str]:
            return [name for name in names if importlib.util.find_spec(name)]

    return Worker


def test_b71_an_actor_that_holds_only_torch_numpy_and_ray_performs_what_the_driver_sends(interpreter: Path) -> None:
    handle = ray.remote(stock_worker()).options(num_cpus=0, runtime_env={"py_executable": str(interpreter)}).remote()
    try:
        absent = ["pydantic", "vllm", "transformers", "omegaconf"]
        assert all(map(importlib.util.find_spec, absent))
        assert ray.get(handle.present.remote([*absent, "torch"]), timeout=60) == ["torch"]
        member = PolicyMember("policy worker 0", Side.TRAINER, 1, handle)
        request = {"rank": 0, "specs": None, "num_trainers": 1, "epoch": 1, "answer_within_s": 20.0}
        (outcome,) = map(Outcome.from_plain, ray.get(member.submit("declare", [request]), timeout=60))
        assert outcome.fault is None
        assert {spec.name for spec in Manifest.from_plain(outcome.value["manifest"]).specs} == {"weight", "bias"}
    finally:
        ray.kill(handle)
