"""NeMo RL's other processes: what holds a synchronizer away from the driver, and workers that lack the package.

Imports nothing of the package, so that an actor may be without it.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any


class Original:
    """The synchronizer that NeMo RL had made for the single controller."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> None:
        self.timers.append(timer)


@dataclass
class ActorArgs:
    """The fields of NeMo RL's SingleControllerActorArgs that matter here."""

    trainer_handle: Any
    gen_handle: Any
    train_cluster: Any
    inference_cluster: Any
    weight_synchronizer: Any


class SingleController:
    """An asyncio actor that owns the loop: refits in a thread, without a timer, while requests go on."""

    def __init__(self, actor_args: ActorArgs) -> None:
        self.synchronizer = actor_args.weight_synchronizer

    async def sync(self) -> Any:
        return await asyncio.to_thread(self.synchronizer.sync_weights, kv_scales=None)

    async def stop(self) -> None:
        self.synchronizer.shutdown()
        self.synchronizer.shutdown()


class Collector:
    """Holds a copy of the generation, synchronizer included, and drops it."""

    def __init__(self, generation: Any) -> None:
        self.generation = generation

    def drop(self) -> None:
        self.generation.shutdown()
        self.generation = None


class Hidden:
    """Finds this package nowhere."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "nemo_rl_reshard":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class WithoutPackage:
    """A worker of either side whose environment has everything but this package."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        sys.meta_path.insert(0, Hidden())

    async def checkpoint_engine_rpc_async(self, checkpoint_method: Any, method_args: tuple[Any, ...] = ()) -> list[Any]:
        return [checkpoint_method(self, *method_args)]
