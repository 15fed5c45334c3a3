"""NeMo RL's own clusters, policy and engines, made as its `setup` makes them."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import ray
from nemo_rl.algorithms.grpo import MasterConfig
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES, RayVirtualCluster
from nemo_rl.models.generation.vllm import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy

TOKENIZER = SimpleNamespace(pad_token_id=0)
"""All that the driver, and version 1 of a policy worker, reads of a tokenizer unless it saves a checkpoint."""


class Parts:
    """`policy`, `generation` and the two `clusters` of a configuration."""

    def __init__(self, config: MasterConfig) -> None:
        # NeMo RL starts these actors in environments that it builds from the network; here one environment serves all.
        ACTOR_ENVIRONMENT_REGISTRY.update(dict.fromkeys(ACTOR_ENVIRONMENT_REGISTRY, PY_EXECUTABLES.SYSTEM))
        self.config = config
        num_inference = config.policy["generation"]["colocated"]["resources"]["gpus_per_node"]
        num_trainers = config.cluster["gpus_per_node"] - num_inference
        # Ray may hold the names of actors that a test killed for minutes; so no two worlds share one.
        world = uuid.uuid4().hex[:8]
        self.clusters = (_cluster(f"train-{world}", num_trainers), _cluster(f"inference-{world}", num_inference))
        self.policy = Policy(
            cluster=self.clusters[0],
            config=config.policy,
            tokenizer=TOKENIZER,
            init_optimizer=False,
            init_reference_model=False,
            name_prefix=f"policy-{world}",
        )
        self.generation = VllmGeneration(
            cluster=self.clusters[1], config=config.policy["generation"], name_prefix=f"vllm-{world}"
        )

    def connect(self) -> None:
        """What `setup` does for NeMo RL's own refit: a process group of all, and the names of the tensors."""
        address, port = self.clusters[0].get_master_address_and_port()
        num_trainers = self.clusters[0].world_size()
        size = num_trainers + self.clusters[1].world_size()
        sides: tuple[Any, Any] = (self.policy, self.generation)
        joining = [side.init_collective(address, port, size, train_world_size=num_trainers) for side in sides]
        ray.get([reference for references in joining for reference in references], timeout=120)
        self.generation.prepare_refit_info(self.policy.prepare_refit_info())

    def stop(self) -> None:
        """Whatever state they are in."""
        self.generation.shutdown()
        self.policy.shutdown()
        for cluster in self.clusters:
            cluster.shutdown()


def _cluster(name: str, num_gpus: int) -> RayVirtualCluster:
    return RayVirtualCluster(
        name=name,
        bundle_ct_per_node_list=[num_gpus],
        use_gpus=True,
        num_gpus_per_node=num_gpus,
        max_colocated_worker_groups=1,
    )
