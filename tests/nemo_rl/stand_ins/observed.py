"""A running NeMo RL world whose weights can be changed on one side and read on the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from nemo_rl.algorithms.grpo import refit_policy_generation
from nemo_rl.utils.timer import Timer

from nemo_rl_reshard.integrations.nemo_rl.attach import attach
from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer
from stand_ins import in_actors
from stand_ins.parts import Parts
from stand_ins.recipe import Recipe

TIMEOUT_S = 120
Parameters = list[dict[str, torch.Tensor]]
"""One entry per engine worker, engines in order and executor ranks within: name -> tensor."""


class ObservedWorld:
    """Trainers and engines of a recipe."""

    def __init__(self, recipe: Recipe, checkout: Path) -> None:
        self.recipe = recipe
        self.parts = Parts(recipe.master_config(checkout))
        self.parts.connect()

    @property
    def generation(self) -> Any:
        return self.parts.generation

    def attach(self, **refit: Any) -> ReshardWeightSynchronizer | None:
        """`attach` with this `refit:` section, in place of what was attached before."""
        self.parts.config.refit = {"deadline_s": 60, "grace_s": 10, **refit}
        if self.generation.weight_synchronizer is not None:
            self.generation.weight_synchronizer.shutdown()
            self.generation.weight_synchronizer = None
        return attach(self.parts.policy, self.generation, self.parts.clusters, self.parts.config)

    def refit(self, timer: Timer | None = None) -> dict[str, float]:
        """As every loop of NeMo RL asks for it."""
        return refit_policy_generation(self.parts.policy, self.generation, False, timer=timer)

    def refit_on_nothing(self, timer: Timer | None = None) -> Parameters:
        """What a refit leaves in engines whose parameters were made NaN before."""
        self.on_engines(in_actors.forget_parameters)
        self.refit(timer)
        return self.parameters()

    def change_weights(self, factor: float) -> None:
        self.on_trainers(in_actors.change_weights, factor=factor)

    def parameters(self) -> Parameters:
        """What every engine holds."""
        found = self.on_engines(in_actors.engine_parameters)
        return [in_actors.from_plain(worker) for engine in found for worker in engine]

    def stock_parameters(self) -> Parameters:
        """What every engine holds after the stock generator's whole tensors went through vLLM's own loader."""
        whole = self.on_trainers(in_actors.full_tensors)[0]
        self.on_engines(in_actors.load_whole, whole)
        return self.parameters()

    def on_trainers(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """`function(worker, **arguments)` on every policy worker; answers in rank order."""
        workers = self.parts.policy.worker_group.workers
        # By keyword alone, as the plugin asks: decorators of version 2 of the worker hide its methods' signatures.
        return ray.get([each.__ray_call__.remote(fn=function, **arguments) for each in workers], timeout=TIMEOUT_S)

    def on_engines(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(worker, *arguments)` in every engine worker; per engine the answers in executor order."""
        rpc = "checkpoint_engine_rpc_async" if self.recipe.is_async else "checkpoint_engine_rpc"
        asked = self.generation.worker_group.run_all_workers_single_data(
            rpc,
            checkpoint_method=function,
            method_args=arguments,
            run_rank_0_only_axes=["tensor_parallel", "pipeline_parallel"],
        )
        return ray.get(asked, timeout=TIMEOUT_S)

    def stop(self) -> None:
        self.parts.stop()


def assert_same(found: Parameters, expected: Parameters) -> None:
    """Every parameter of every engine worker, bit for bit, and none is left as NaN."""
    assert len(found) == len(expected)
    for worker, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert list(ours) == list(theirs)
        different = [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]
        assert not different, f"engine worker {worker}: {different}"
        assert all(torch.isfinite(tensor).all() for tensor in ours.values())


def assert_two_refits_are_stock(world: ObservedWorld, backend: str) -> None:
    """Two refits by `backend`, verified where it can, leave what the stock loader would."""
    attached = world.attach(backend=backend, **({} if backend == "nemo_rl" else {"verify": "full"}))
    assert (attached is None) == (backend == "nemo_rl")
    for factor in (-1.25, 1.5):
        world.change_weights(factor)
        found = world.refit_on_nothing()
        assert_same(found, world.stock_parameters())
