"""Trainers in asyncio actors, which run queued calls in any order, a latch that holds some back, and another driver."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from equipment.ray_light import LightTrainer, LightWorld
from nemo_rl_reshard.config import RefitConfig
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.shared import Shared
from nemo_rl_reshard.params.manifest import Side


class CoroutineTrainer(LightTrainer):
    """One coroutine makes the whole actor an asyncio one: a call whose arguments are not there yet is overtaken."""

    async def is_alive(self) -> bool:
        return True

    def reshard(
        self,
        operation: str,
        arguments: Sequence[dict[str, Any]],
        shared: dict[str, Any] | None = None,
        _held: None = None,
    ) -> list[dict[str, Any]]:
        return super().reshard(operation, arguments, shared)


class Latch:
    """Keeps calls that need `wait` from starting until it is open."""

    def __init__(self) -> None:
        self._is_open = asyncio.Event()

    async def wait(self) -> None:
        await self._is_open.wait()

    async def open(self) -> None:
        self._is_open.set()


@dataclass(frozen=True)
class HeldMember(Member):
    """A trainer whose calls of the operations in `held` stay queued; `stale` are the answers to come."""

    held: dict[str, ray.ObjectRef[Any]] = field(default_factory=dict)
    stale: list[ray.ObjectRef[Any]] = field(default_factory=list)

    def submit(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Shared | None = None
    ) -> ray.ObjectRef[Any]:
        if operation not in self.held:
            return super().submit(operation, arguments, shared)
        told = None if shared is None else shared.reference
        self.stale.append(self.handle.reshard.remote(operation, list(arguments), told, self.held[operation]))
        return self.stale[-1]


class CoroutineWorld(LightWorld):
    """A light world whose trainers are asyncio actors, and whose calls a latch can hold back."""

    def __init__(self) -> None:
        super().__init__()
        self.latch = ray.remote(num_cpus=0)(Latch).remote()

    def _trainer(self, rank: int) -> HeldMember:
        handle = ray.remote(num_cpus=0)(CoroutineTrainer).remote(rank)
        return HeldMember(f"trainer {rank}", Side.TRAINER, 1, handle)

    def hold(self, *operations: str) -> None:
        """Have the calls of `operations` to trainer 1 wait for the latch."""
        waiting = self.latch.wait.remote()
        self.trainers[1].held.update(dict.fromkeys(operations, waiting))

    def let_go(self) -> list[Outcome]:
        """Start the calls held back; what they answered."""
        member = self.trainers[1]
        member.held.clear()
        ray.get(self.latch.open.remote(), timeout=30)
        return [Outcome.from_plain(answer) for (answer,) in ray.get(member.stale, timeout=30)]


class Driver:
    """Another process that drives the same members."""

    def __init__(self, trainers: list[Member], engines: list[Member], config: RefitConfig, epoch: int) -> None:
        self._controller = RefitController(trainers, engines, config, epoch=epoch)

    def refit(self, version: int) -> tuple[int, int]:
        self._controller.refit(version)
        return self._controller.epoch, self._controller.generation

    def close(self) -> None:
        self._controller.close()
