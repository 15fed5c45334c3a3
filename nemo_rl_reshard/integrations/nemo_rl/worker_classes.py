"""The way in for a NeMo RL whose stock actors run no functions: methods to mix into worker classes of one's own.

Not needed while the start-up check finds its seams. If it does not, it says which of the two classes to use:

    # my_workers.py, on PYTHONPATH; the fully qualified names go into NeMo RL's own options
    @ray.remote
    class PolicyWorker(ReshardPolicyMethods, DTensorPolicyWorkerV2Impl): ...

    class EngineWorker(ReshardEngineMethods, vllm.v1.worker.gpu_worker.Worker, VllmInternalWorkerExtension): ...

`Policy(..., worker_extension_cls_fqn="my_workers.PolicyWorker")`, through `setup(policy_factory=...)`, with an entry
for that name in ACTOR_ENVIRONMENT_REGISTRY; and `policy.generation.vllm_kwargs.worker_cls: my_workers.EngineWorker`.
The members of a refit use these methods wherever they find them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_reshard.integrations.nemo_rl.description import describe
from nemo_rl_reshard.integrations.nemo_rl.policy_rank import perform_on_policy
from nemo_rl_reshard.orchestration.worker_extension import ReshardWorkerExtension


class ReshardPolicyMethods:
    """For a policy worker: every request of a refit by name."""

    def reshard(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """See `perform_on_policy`."""
        return perform_on_policy(self, operation, arguments, shared)

    def reshard_describe(self) -> dict[str, Any]:
        """See `describe`."""
        return describe(self)


class ReshardEngineMethods(ReshardWorkerExtension):
    """For a vLLM worker: every request of a refit by name."""

    def reshard_describe(self) -> dict[str, Any]:
        """See `describe`."""
        return describe(self)
