"""Whole refits in one process: catalogs from layouts, a thread per rank, gather-then-slice as the oracle."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, explicit_ranks, raise_first
from nemo_rl_reshard.layout import Mesh, TensorLayout, parse_placement
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.handout import DEFAULT_IN_FLIGHT
from nemo_rl_reshard.runtime.leftover_plan import Gather
from nemo_rl_reshard.runtime.one_process import LoopbackMeeting, together
from nemo_rl_reshard.runtime.session import RankSession, SessionState
from nemo_rl_reshard.runtime.world import Seat, World, join_processes
from nemo_rl_reshard.topology import Topology
from nemo_rl_reshard.transport.protocol import Transport
from nemo_rl_reshard.transport.rendezvous import RendezvousServer

HOST = "127.0.0.1"
MLP, NORM = "model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"

Declared = Sequence[tuple[str, TensorLayout, str]]
"""Name, layout and dtype of each tensor, in model order."""


def mesh_layout(shape: tuple[int, ...], mesh: tuple[int, ...], ranks: Sequence[int], *placements: str) -> TensorLayout:
    """The layout of a tensor on a row-major mesh of `ranks`."""
    axes = tuple(f"axis{index}" for index in range(len(mesh)))
    return TensorLayout.from_mesh(
        shape, Mesh(axes, mesh, tuple(ranks)), tuple(parse_placement(text) for text in placements)
    )


def catalog(side: Side, declared: Declared, ranks: Sequence[int]) -> Catalog:
    """One side's catalog; `ranks` may include some that hold nothing."""
    return Catalog(
        side=side,
        specs={name: TensorSpec(name, layout.shape, dtype) for name, layout, dtype in declared},
        layouts={name: layout for name, layout, _ in declared},
        indirect={},
        ranks=tuple(ranks),
    )


def planned_ranks(
    source: Declared,
    target: Declared,
    *,
    num_trainers: int,
    num_targets: int,
    policy: RoutePolicy = RoutePolicy.ALL,
    domains: tuple[tuple[int, ...], ...] = (),
    options: PlanOptions | None = None,
    in_flight: int = DEFAULT_IN_FLIGHT,
    gather: Gather | None = None,
    in_rounds: bool = False,
) -> tuple[ExplicitRank, ...]:
    """Every rank of a planned refit: trainers 0 .. num_trainers - 1, then the target's ranks.

    With `gather` leftovers are gathered and broadcast that way, else they travel beside the rest. NCCL's worlds want to
    be planned `in_rounds`.
    """
    size = num_trainers + num_targets
    held = catalog(Side.TRAINER, source, range(num_trainers))
    needed = catalog(Side.INFERENCE, target, range(num_trainers, size))
    routes = decide_routes(held, needed, policy)
    topology = Topology(domains=domains)
    plan = make_plan(held, needed, routes, topology, options or PlanOptions(), broadcast=gather is not None)
    check_plan(plan, held, needed, routes, topology)
    gather = gather or Gather.EVERYWHERE
    return explicit_ranks(held, needed, plan, in_flight=in_flight, gather=gather, in_rounds=in_rounds)


def mixed_ranks(
    *,
    num_trainers: int = 2,
    engines: tuple[int, int] = (2, 2),
    mlp_shape: tuple[int, int] = (6, 4),
    norm_shape: tuple[int] = (5,),
    options: PlanOptions | None = None,
    in_rounds: bool = False,
) -> tuple[ExplicitRank, ...]:
    """Trainers, then engines (replicas, tensor parallel) in one domain: MLP goes direct and is forwarded, NORM is left.

    Small buckets and messages, so that few elements already travel in many steps.
    """
    trainers = range(num_trainers)
    inference = range(num_trainers, num_trainers + engines[0] * engines[1])
    return planned_ranks(
        [
            (MLP, mesh_layout(mlp_shape, (num_trainers,), trainers, "S(0)"), "float32"),
            (NORM, mesh_layout(norm_shape, (num_trainers,), trainers, "S(0)"), "float32"),
        ],
        [
            (MLP, mesh_layout(mlp_shape, engines, inference, "R", "S(1)"), "bfloat16"),
            (NORM, mesh_layout(norm_shape, (len(inference),), inference, "R"), "float32"),
        ],
        num_trainers=num_trainers,
        num_targets=len(inference),
        policy=RoutePolicy.FFN,
        domains=(tuple(inference),),
        options=options or PlanOptions(bucket_bytes=64, message_bytes=16),
        in_flight=2,
        in_rounds=in_rounds,
    )


class ThreadWorld:
    """A refit world whose ranks are threads of this process, over loopback, or over gloo or nccl and a real rendezvous.

    `live[rank]` is each rank. `wrap` maps a rank to what its transport is wrapped in when it next joins.
    """

    def __init__(self, ranks: Sequence[ExplicitRank], *, over: str = "loopback", timeout_s: float = 30.0) -> None:
        self.over = over
        self.timeout_s = timeout_s
        self.generation = 0
        self.wrap: dict[int, Callable[[Transport], Transport]] = {}
        self._meeting = LoopbackMeeting()
        self._token = secrets.token_bytes(32)
        self._server = RendezvousServer(HOST, self._token) if over != "loopback" else None
        self.live = {rank.rank: LiveRank(rank, self._join) for rank in ranks}
        self.rebuild()

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *_: object) -> None:
        for session in self.sessions.values():
            session.close()
        if self._server is not None:
            self._server.close()

    @property
    def sessions(self) -> dict[int, RankSession]:
        return {rank: each.session for rank, each in self.live.items()}

    def plain_worlds(self) -> dict[int, dict[str, Any]]:
        """What the ranks of the next generation are told."""
        self.generation += 1
        num_trainers = next(iter(self.live.values())).made_of.num_trainers
        worlds = self._meeting.worlds(num_trainers, len(self.live), self.generation)
        if self._server is not None:
            host, port = self._server.address
            told = {"address": f"{host}:{port}", "token_hex": self._token.hex(), "host": HOST, "deadline_s": 10.0}
            told["transport"] = self.over
            worlds = {rank: {**world, **told} for rank, world in worlds.items()}
        return worlds

    def rebuild(self) -> None:
        """Join a new generation, on every rank."""
        worlds = self.plain_worlds()
        raise_first(together({rank: partial(s.connect, worlds[rank]) for rank, s in self.sessions.items()}, 30.0))
        for rank, each in self.live.items():
            each.session.adopt(each.made_of.handout)
            assert each.session.state is SessionState.READY, rank

    def outcomes(self, version: int, **order: Any) -> dict[int, Any]:
        """One refit: each rank's report, or what it raised."""
        asked = {"version": version, "verify": "full", "deadline_s": 10.0, "seed": version, **order}
        calls = {rank: partial(session.refit, asked) for rank, session in self.sessions.items()}
        return together(calls, self.timeout_s)

    def refit(self, version: int, **order: Any) -> dict[int, dict[str, Any]]:
        """Fill the trainers with values of `version`, refit, and compare with gather-then-slice."""
        for each in self.live.values():
            each.fill(version)
        reports = self.outcomes(version, **order)
        raise_first(reports)
        assert_gather_then_slice(self.live)
        assert {session.version for session in self.sessions.values()} == {version}
        return reports

    def _join(self, world: World) -> Seat:
        seat = (self._meeting.join if self._server is None else join_processes)(world)
        wrap = self.wrap.pop(world.rank, None)
        return seat if wrap is None else Seat(wrap(seat.transport), seat.store)


def assert_gather_then_slice(live: Mapping[int, LiveRank]) -> None:
    """Every target shard equals its slice of the tensor gathered from the trainers, cast to the target's dtype."""
    wholes: dict[str, torch.Tensor] = {}
    for each in live.values():
        if each.source is None:
            continue
        shapes = {spec.name: (spec.shape, getattr(torch, spec.dtype)) for spec in each.made_of.source_specs}
        for name, shards in each.source.shards.items():
            shape, dtype = shapes[name]
            whole = wholes.setdefault(name, torch.zeros(shape, dtype=dtype))
            for region, values in shards:
                whole[region.slices] = values
    for rank, each in live.items():
        if each.target is None:
            continue
        for name, shards in each.target.shards.items():
            for region, values in shards:
                wanted = wholes[name][region.slices].to(values.dtype)
                assert torch.equal(values, wanted), f"rank {rank}, {name}, {region}"
