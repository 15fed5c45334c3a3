"""Light actors: trainers and engines of plain tensors, so that a whole refit world under Ray starts in seconds."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ray
import torch

from equipment.ray_faults import Planned, with_fault
from nemo_rl_reshard.config import RefitConfig
from nemo_rl_reshard.layout import Mesh, Region, Shard, TensorLayout
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.rank_operations import HeldRank, perform
from nemo_rl_reshard.orchestration.served_ranks import ServedRanks
from nemo_rl_reshard.orchestration.trainer_actor import ReshardTrainer
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.runtime.endpoint import Source
from nemo_rl_reshard.runtime.explicit import ExplicitSource, ExplicitTarget

NUM_TRAINERS = 3
GATE, DOWN, NORM, LAST = (
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
SPECS = (
    TensorSpec(GATE, (8, 6), "float32"),
    TensorSpec(DOWN, (2, 9), "float32"),  # cut by rows, the third trainer holds nothing
    TensorSpec(NORM, (7,), "float32"),
    TensorSpec(LAST, (5, 4), "float32"),
)


def whole(spec: TensorSpec, version: int) -> torch.Tensor:
    """Every element tells version, tensor and position; exact in float32."""
    start = version * 4096 + SPECS.index(spec) * 512
    return torch.arange(start, start + spec.numel, dtype=torch.float32).view(spec.shape)


def rows_of(spec: TensorSpec, rank: int) -> Sequence[Region]:
    """What trainer `rank` holds: rows, cut as torch.chunk does."""
    mesh = Mesh(("dp",), (NUM_TRAINERS,), tuple(range(NUM_TRAINERS)))
    return TensorLayout.from_mesh(spec.shape, mesh, (Shard(0),)).regions_of(rank)


def need_of(spec: TensorSpec, engine: int) -> Region:
    """Engine 0 needs everything, engine 1 the right part of matrices."""
    whole_region = Region.whole(spec.shape)
    if engine == 0 or len(spec.shape) == 1:
        return whole_region
    left = spec.shape[1] // 3
    return Region((0, left), (spec.shape[0], spec.shape[1] - left))


class LightTrainer(ReshardTrainer):
    """Holds its rows of every tensor, filled for a version."""

    def __init__(self, rank: int) -> None:
        torch.set_num_threads(1)
        shards = {spec.name: [(box, torch.zeros(box.extent)) for box in rows_of(spec, rank)] for spec in SPECS}
        self._shards = {name: held for name, held in shards.items() if held}
        self._fault: Planned | None = None
        self._operation = ""

    def fill(self, version: int) -> int:
        """Hold the weights of `version`; the process id."""
        for spec in SPECS:
            for region, values in self._shards.get(spec.name, ()):
                values.copy_(whole(spec, version)[region.slices])
        return os.getpid()

    def arm(self, fault: Planned | None) -> None:
        """Strike `fault` in the next world."""
        self._fault = fault

    def reshard_source(self, rank: int) -> Source:
        fault, self._fault = self._fault, None
        return with_fault(ExplicitSource(SPECS, self._shards), fault, lambda: self._operation == "refit")

    def lose_plan(self) -> None:
        """Lose the plan that this rank was given, so that it cannot start the next refit."""
        HeldRank.of(self).session.declare()

    def reshard(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        self._operation = operation
        return super().reshard(operation, arguments, shared)


class LightEngine(ServedRanks):
    """Needs its regions of every tensor; "generates" by showing them."""

    def __init__(self, engine: int, name: str) -> None:
        super().__init__(name)
        torch.set_num_threads(1)
        self._specs: tuple[TensorSpec, ...] = SPECS
        needs = {spec.name: need_of(spec, engine) for spec in SPECS}
        self._shards = {name: [(box, torch.full(box.extent, torch.nan))] for name, box in needs.items()}
        self._fault: Planned | None = None
        self._unfinished = [0]
        self._publishes_after_s = 0.0
        self._operation = ""
        self._dies_in = ""

    def arm(self, fault: Planned | None) -> None:
        """Strike `fault` in the next world."""
        self._fault = fault

    def process_id(self) -> int:
        """Of the actor."""
        return os.getpid()

    def have_requests(self, *counts: int) -> None:
        """What the next idle checks find, one after the other; the last count stays."""
        self._unfinished = list(counts)

    def publish_late(self, seconds: float) -> None:
        """Take this long over the next publication."""
        self._publishes_after_s = seconds

    def die_in(self, operation: str) -> None:
        """End this process when asked for `operation`."""
        self._dies_in = operation

    def reshard(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        self._operation = operation
        if operation == self._dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if operation == "publish":
            seconds, self._publishes_after_s = self._publishes_after_s, 0.0
            threading.Event().wait(seconds)
        return super().reshard(operation, arguments, shared)

    def want(self, tensor: str) -> None:
        """Need one tensor more, of shape [2]."""
        self._specs += (TensorSpec(tensor, (2,), "float32"),)
        self._shards[tensor] = [(Region.whole((2,)), torch.full((2,), torch.nan))]

    def work(self, seconds: float) -> None:
        """Be busy with something that has nothing to do with refits."""
        threading.Event().wait(seconds)

    def threads(self) -> list[str]:
        """Names of the refit's threads that live in this actor."""
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("refit-")]

    def generate(self) -> dict[str, torch.Tensor]:
        """Everything it holds; refused while it must not serve."""
        self.gate.check_may_generate()
        return self.held()

    def held(self) -> dict[str, torch.Tensor]:
        """The same, whether it may serve or not."""
        return {name: held[0][1] for name, held in self._shards.items()}

    def on_ranks(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: dict[str, Any] | None
    ) -> list[dict[str, Any]]:
        (argument,) = arguments
        return [perform(self, Side.INFERENCE, self._end, operation, {**(shared or {}), **argument})]

    def num_unfinished(self) -> int:
        return self._unfinished.pop(0) if len(self._unfinished) > 1 else self._unfinished[0]

    def reset_caches(self) -> bool:
        return True

    def _end(self, rank: int) -> ExplicitTarget:
        fault, self._fault = self._fault, None
        return with_fault(ExplicitTarget(self._specs, self._shards), fault, lambda: self._operation == "refit")


class LightWorld:
    """Three trainers and two engines; `heal` replaces what a test has broken."""

    def __init__(self) -> None:
        self.trainers = [self._trainer(rank) for rank in range(NUM_TRAINERS)]
        self.engines = [self._engine(engine) for engine in range(2)]

    def _trainer(self, rank: int) -> Member:
        return Member(f"trainer {rank}", Side.TRAINER, 1, ray.remote(num_cpus=0)(LightTrainer).remote(rank))

    def _engine(self, engine: int, variables: Mapping[str, str] = MappingProxyType({})) -> Member:
        name = f"engine {engine}"
        actor = ray.remote(num_cpus=0, runtime_env={"env_vars": dict(variables)})(LightEngine)
        return Member(name, Side.INFERENCE, 1, actor.remote(engine, name))

    def controller(self, **section: Any) -> RefitController:
        config = RefitConfig.read({"route": "all", "deadline_s": 6, "grace_s": 5, "setup_s": 60, **section})
        return RefitController(self.trainers, self.engines, config)

    def fill(self, version: int) -> list[int]:
        return ray.get([member.handle.fill.remote(version) for member in self.trainers], timeout=60)

    def arm(self, member: Member, fault: Planned) -> None:
        ray.get(member.handle.arm.remote(fault), timeout=60)

    def replace_engine(self, engine: int, **variables: str) -> Member:
        """A new one, with `variables` in its environment."""
        ray.kill(self.engines[engine].handle)
        self.engines[engine] = self._engine(engine, variables)
        return self.engines[engine]

    def replace_trainers(self) -> list[Member]:
        """A new group; the old one's last checkpoint is whatever version `fill` is given next."""
        for member in self.trainers:
            ray.kill(member.handle)
        self.trainers = [self._trainer(rank) for rank in range(NUM_TRAINERS)]
        return self.trainers

    def assert_serves(self, version: int) -> None:
        """Both engines hold exactly gather-then-slice of `version`."""
        for engine, member in enumerate(self.engines):
            held = ray.get(member.handle.generate.remote(), timeout=60)
            for spec in SPECS:
                expected = whole(spec, version)[need_of(spec, engine).slices]
                assert torch.equal(held[spec.name], expected), (member.name, spec.name)

    def versions(self) -> list[int | None]:
        return ray.get([member.handle.version.remote() for member in self.engines], timeout=60)

    def stop(self) -> None:
        for member in [*self.trainers, *self.engines]:
            ray.kill(member.handle)
