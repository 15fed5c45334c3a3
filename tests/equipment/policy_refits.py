"""Whole refits from trainers in spawned gloo processes to explicit inference ranks among the same processes.

The trainers keep their own process group for training, as a policy's workers do; the refit world is another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.catalog import merge
from nemo_rl_reshard.params.manifest import Manifest
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import RouteKind, RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.explicit import ExplicitTarget
from nemo_rl_reshard.runtime.handout import hand_out
from nemo_rl_reshard.runtime.session import RankSession
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.replicas import RegionDigest, check_replicas
from nemo_rl_reshard.topology import Topology
from nemo_rl_reshard.transport.rendezvous import RendezvousServer

HOST = "127.0.0.1"


@dataclass
class PolicyRefit:
    """This process's rank, ready to refit; `routes` is how every tensor goes, `target` what an inference rank has."""

    session: RankSession
    target: ExplicitTarget | None
    routes: dict[str, RouteKind]
    server: RendezvousServer | None

    def refit(self, version: int) -> dict[str, torch.Tensor]:
        """One refit with everything verified; afterwards what an inference rank holds, copied (empty on a trainer)."""
        if self.target is not None:
            for shards in self.target.shards.values():
                for _, values in shards:
                    values.fill_(float("nan"))
        self.session.refit({"version": version, "verify": "full", "deadline_s": 60.0, "seed": version})
        held = self.target.shards if self.target is not None else {}
        return {name: values.clone() for name, ((_, values),) in held.items()}

    def close(self) -> None:
        self.session.close()
        if self.server is not None:
            dist.barrier()
            self.server.close()
        else:
            dist.barrier()


def prepared(
    rank: int,
    size: int,
    num_trainers: int,
    source: Callable[[], DTensorSource],
    dtype: torch.dtype = torch.bfloat16,
    policy: RoutePolicy = RoutePolicy.ALL,
) -> PolicyRefit:
    """Declare, plan (the same on every process) and connect. Ranks from `num_trainers` on are engines of one rank.

    They need every tensor whole, floats in `dtype`. Trainers call `source`.
    """
    trainer = source() if rank < num_trainers else None
    told = _all_told((trainer.manifest(rank).to_plain(), _digests(trainer, num_trainers)) if trainer else None)
    held = merge([Manifest.from_plain(manifest) for manifest, _ in told[:num_trainers]])
    check_replicas(
        {at: [RegionDigest.from_plain(d) for d in digests] for at, (_, digests) in enumerate(told[:num_trainers])}
    )
    specs = [
        TensorSpec(spec.name, spec.shape, str(dtype).removeprefix("torch.") if "float" in spec.dtype else spec.dtype)
        for spec in held.specs.values()
    ]
    target = None
    if trainer is None:
        memory = {
            spec.name: [(Region.whole(spec.shape), torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)))]
            for spec in specs
        }
        target = ExplicitTarget(specs, memory)
    session = RankSession(rank, source=trainer, target=target)
    plain = session.declare(
        None if trainer else [[spec.name, list(spec.shape), spec.dtype] for spec in held.specs.values()]
    )
    needed = merge([Manifest.from_plain(manifest) for manifest in _all_told(plain)[num_trainers:]])
    check_match(held, needed)
    routes = decide_routes(held, needed, policy)
    plan = make_plan(held, needed, routes, Topology(), PlanOptions(bucket_bytes=4096, message_bytes=512))
    token = secrets.token_bytes(32)
    server = RendezvousServer(HOST, token) if rank == 0 else None
    meeting = [(f"{HOST}:{server.address[1]}", token.hex()) if server else None]
    dist.broadcast_object_list(meeting)
    address, token_hex = meeting[0] or ("", "")
    session.connect(
        {
            "address": address,
            "token_hex": token_hex,
            "rank": rank,
            "size": size,
            "host": HOST,
            "generation": 1,
            "deadline_s": 60.0,
            "num_trainers": num_trainers,
        }
    )
    session.adopt(hand_out(plan, held).of_rank(rank))
    return PolicyRefit(session, target, {name: route.kind for name, route in routes.items()}, server)


def _digests(trainer: DTensorSource, num_trainers: int) -> list[Any]:
    return [digest.to_plain() for digest in trainer.replica_digests(num_trainers=num_trainers)]


def _all_told(own: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told
