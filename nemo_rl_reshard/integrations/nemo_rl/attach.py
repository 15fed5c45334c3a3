"""attach: put this package's refit under an unmodified NeMo RL, between its `setup` and its training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.integrations.nemo_rl.members import EngineMember, PolicyMember, members_of
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlBackend, read_section
from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer


def attach(
    policy: Any, policy_generation: Any, clusters: Sequence[Any], config: Any
) -> ReshardWeightSynchronizer | None:
    """Refit `policy_generation` from `policy` as the `refit:` section of `config` says; None for backend nemo_rl."""
    section = read_section(config)
    if section.backend is NemoRlBackend.NEMO_RL:
        return None
    trainers, engines = members_of(policy, policy_generation)
    check_sizes(clusters, trainers, engines)
    synchronizer = ReshardWeightSynchronizer(trainers, engines, section)
    synchronizer.init_communicator()
    policy_generation.weight_synchronizer = synchronizer
    return synchronizer


def check_sizes(clusters: Sequence[Any], trainers: Sequence[PolicyMember], engines: Sequence[EngineMember]) -> None:
    """Raise ConfigError unless the two sides are exactly as large as the training and the inference cluster."""
    faults = FaultList("clusters of the refit", ConfigError)
    for name, cluster, members in zip(("training", "inference"), clusters, (trainers, engines), strict=True):
        num_ranks = sum(member.num_ranks for member in members)
        if cluster.world_size() != num_ranks:
            faults.add(f"the {name} cluster has {cluster.world_size()} GPUs and its worker group {num_ranks} ranks")
    faults.raise_if_any()
