"""Stock NeMo RL actors as members of a refit: how a request reaches a rank without a class of ours inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef

from nemo_rl_reshard.integrations.nemo_rl.engine_rank import perform_on_engine
from nemo_rl_reshard.integrations.nemo_rl.policy_rank import perform_on_policy
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.params.manifest import Side


@dataclass(frozen=True)
class PolicyMember(Member):
    """One trainer actor, one rank. Its actor may run queued calls in any order: each carries its world's epoch."""

    def submit(self, operation: str, arguments: Sequence[dict[str, Any]]) -> ObjectRef[Any]:
        """Run our function on the actor's instance, or its own `reshard` where a class of ours was mixed in."""
        if hasattr(self.handle, "reshard"):
            return super().submit(operation, arguments)
        reference: ObjectRef[Any] = self.handle.__ray_call__.remote(perform_on_policy, operation, list(arguments))
        return reference


@dataclass(frozen=True)
class EngineMember(Member):
    """One engine, through the actor that owns it: a rank per worker, by executor rank."""

    is_async: bool = False

    @property
    def rpc(self) -> str:
        """The actor's method that passes a call on to every worker of its engine."""
        return "checkpoint_engine_rpc_async" if self.is_async else "checkpoint_engine_rpc"

    def submit(self, operation: str, arguments: Sequence[dict[str, Any]]) -> ObjectRef[Any]:
        """Run our function on every worker of the engine.

        A stock engine has no gate to open, so "publish" is answered here.
        """
        if operation == "publish":
            answered: ObjectRef[Any] = ray.put([Outcome(int(each["rank"])).to_plain() for each in arguments])
            return answered
        reference: ObjectRef[Any] = getattr(self.handle, self.rpc).remote(
            checkpoint_method=perform_on_engine, method_args=(operation, list(arguments))
        )
        return reference


def members_of(policy: Any, policy_generation: Any) -> tuple[list[PolicyMember], list[EngineMember]]:
    """Both sides in rank order: every policy worker, then the owner of every engine by data-parallel index.

    So a trainer's refit rank is its place in its worker group, and an engine's worker has
    `num_trainers + engine index * (TP * PP) + executor rank`. NeMo RL's own arithmetic is not used: it counts an
    engine twice when expert parallel exceeds tensor parallel.
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
            policy_generation.tp_size * policy_generation.pp_size,
            group.workers[leader],
            is_async=bool(policy_generation.cfg["vllm_cfg"]["async_engine"]),
        )
        for index, leader in enumerate(group.dp_leader_worker_indices)
    ]
    return trainers, engines
