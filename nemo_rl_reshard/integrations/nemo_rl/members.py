"""Stock NeMo RL actors as members of a refit: how a request reaches a rank without a class of ours inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef

from nemo_rl_reshard.errors import StateError
from nemo_rl_reshard.integrations.nemo_rl.engine_rank import perform_on_engine
from nemo_rl_reshard.integrations.nemo_rl.policy_rank import perform_on_policy
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.shared import Shared
from nemo_rl_reshard.params.manifest import Side


def require_ray() -> None:
    """Raise StateError if Ray was shut down. A handle would start a cluster of its own rather than fail."""
    if not ray.is_initialized():
        raise StateError("Ray is shut down, and the actors of the refit with it")


@dataclass(frozen=True)
class StockMember(Member):
    """An actor of NeMo RL's own, in which we run functions."""

    @property
    def takes_functions(self) -> bool:
        """Whether the actor runs a function on its own instance when asked to."""
        return hasattr(self.handle, "__ray_call__")

    def on_actor(self, function: Callable[..., Any], **arguments: Any) -> ObjectRef[Any]:
        """Start `function(instance, **arguments)` in the actor. Raises StateError if Ray was shut down.

        By keyword alone: a decorator around an actor's methods that does not keep their signatures makes Ray refuse
        positional arguments, and NeMo RL has such decorators.
        """
        require_ray()
        reference: ObjectRef[Any] = self.handle.__ray_call__.remote(fn=function, **arguments)
        return reference


@dataclass(frozen=True)
class PolicyMember(StockMember):
    """One trainer actor, one rank. It may run queued calls in any order: every request carries its world's epoch."""

    @property
    def has_methods(self) -> bool:
        """Whether the actor's class is one of `worker_classes`, with a method for every request."""
        return hasattr(self.handle, "reshard")

    def submit(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Shared | None = None
    ) -> ObjectRef[Any]:
        """Run our function on the actor's instance, or the method it was given."""
        require_ray()
        if self.has_methods:
            return super().submit(operation, arguments, shared)
        told = None if shared is None else shared.reference
        return self.on_actor(perform_on_policy, operation=operation, arguments=list(arguments), shared=told)


@dataclass(frozen=True)
class EngineMember(StockMember):
    """One engine, through the actor that owns it: a rank per worker, by executor rank.

    `is_async` says which of NeMo RL's two worker classes the actor is. With `by_name` the engine's workers are of
    `worker_classes` and are asked by the name of their method, for engines that take no functions.
    """

    is_async: bool = False
    by_name: bool = False

    @property
    def rpc(self) -> str:
        """The actor's method that passes a call on to every worker of its engine; both take the same arguments."""
        return "checkpoint_engine_rpc_async" if self.is_async else "checkpoint_engine_rpc"

    def on_workers(self, function: Callable[..., Any] | str, *arguments: Any) -> ObjectRef[Any]:
        """Start `function(worker, *arguments)`, or a method of that name, in every worker; a list by executor rank."""
        require_ray()
        method = getattr(self.handle, self.rpc)
        reference: ObjectRef[Any] = method.remote(checkpoint_method=function, method_args=arguments)
        return reference

    def submit(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Shared | None = None
    ) -> ObjectRef[Any]:
        """Run our function on every worker of the engine. A stock engine has no gate, so "publish" is answered here.

        What is shared goes with the call, once for the engine: its owner would hand its workers the reference itself.
        """
        if operation == "publish":
            answered: ObjectRef[Any] = ray.put([Outcome(int(each["rank"])).to_plain() for each in arguments])
            return answered
        told = None if shared is None else shared.value
        function = "reshard_perform" if self.by_name else perform_on_engine
        return self.on_workers(function, operation, list(arguments), told)


def members_of(policy: Any, policy_generation: Any) -> tuple[list[PolicyMember], list[EngineMember]]:
    """Both sides in rank order: every policy worker, then the owner of every engine by data-parallel index.

    So a trainer's refit rank is its place in its worker group, and an engine's worker has
    `num_trainers + engine index * (TP * PP) + executor rank`. NeMo RL's own arithmetic is not used: it counts an
    engine twice when expert parallel exceeds tensor parallel and there are several such groups.
    """
    trainers = [
        PolicyMember(f"policy worker {rank}", Side.TRAINER, 1, handle)
        for rank, handle in enumerate(policy.worker_group.workers)
    ]
    group = policy_generation.worker_group
    engines = [
        EngineMember(
            f"engine {index}",
            Side.INFERENCE,
            int(policy_generation.tp_size * policy_generation.pp_size),
            group.workers[leader],
            is_async=bool(policy_generation.cfg["vllm_cfg"]["async_engine"]),
        )
        for index, leader in enumerate(group.dp_leader_worker_indices)
    ]
    return trainers, engines
