"""Plan cases: layout pairs as plain values, readable by the package and by a checker that does not trust it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from equipment.declaring import Refit, catalog, layout
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.topology import Topology

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, extent


@dataclass(frozen=True)
class Grid:
    """`ranks`, row-major, on a mesh, with a placement per axis written like "SS(0,2) S(0)"."""

    mesh: tuple[int, ...]
    placements: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Boxes:
    """What each rank has, box by box, where no mesh says it."""

    by_rank: tuple[tuple[int, tuple[Box, ...]], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.by_rank)


Held = Grid | Boxes


@dataclass(frozen=True)
class TensorPair:
    """One tensor on both sides. The trainers' shape and dtype are the target's unless given."""

    name: str
    shape: tuple[int, ...]
    source: Held
    target: Held
    dtype: str = "float32"
    source_dtype: str | None = None
    source_shape: tuple[int, ...] | None = None

    @property
    def trainers_shape(self) -> tuple[int, ...]:
        return self.source_shape or self.shape

    @property
    def trainers_dtype(self) -> str:
        return self.source_dtype or self.dtype


@dataclass(frozen=True)
class PlanCase:
    """A refit as plain values, and why it is worth planning. Ranks that no domain names are domains of their own.

    `leftovers` are the tensors that are expected to go as leftovers. `idle` are target ranks that need nothing.
    """

    name: str
    why: str
    tensors: tuple[TensorPair, ...]
    domains: tuple[tuple[int, ...], ...] = ()
    bucket_bytes: int = 256
    message_bytes: int = 64
    policy: RoutePolicy = RoutePolicy.ALL
    leftovers: tuple[str, ...] = ()
    idle: tuple[int, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(sorted({rank for pair in self.tensors for rank in pair.source.ranks}))

    @property
    def targets(self) -> tuple[int, ...]:
        return tuple(sorted({*self.idle, *(rank for pair in self.tensors for rank in pair.target.ranks)}))

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.sources, *self.targets}))

    @property
    def direct(self) -> tuple[TensorPair, ...]:
        return tuple(pair for pair in self.tensors if pair.name not in self.leftovers)

    def domain_of(self, rank: int) -> object:
        """Something equal for ranks of one domain only."""
        return next((domain for domain in self.domains if rank in domain), rank)

    def alone(self) -> PlanCase:
        """The same refit with every rank a domain of its own."""
        return replace(self, name=f"{self.name}-alone", domains=())


def planned(case: PlanCase) -> Refit:
    """Declare, match, route and plan `case`."""
    topology = Topology(domains=case.domains)
    given = declarations(case, Side.TRAINER)
    wanted = declarations(case, Side.INFERENCE)
    source = catalog(Side.TRAINER, case.sources, given)
    target = catalog(Side.INFERENCE, case.targets, wanted)
    padded = {pair.name: pair.shape for pair in case.tensors if pair.source_shape is not None}
    check_match(source, target, padded=padded, colocated=True)
    routes = decide_routes(source, target, case.policy)
    options = PlanOptions(case.bucket_bytes, case.message_bytes)
    return Refit(source, target, routes, topology, make_plan(source, target, routes, topology, options))


def declared(held: Held, shape: Iterable[int]) -> TensorLayout:
    """The package's own reading of one side."""
    if isinstance(held, Grid):
        return layout(tuple(shape), held.mesh, held.placements, held.ranks)
    boxes = {rank: [Region(*box) for box in found] for rank, found in held.by_rank}
    return TensorLayout.from_regions(tuple(shape), boxes)


def declarations(case: PlanCase, side: Side) -> list[tuple[TensorSpec, TensorLayout]]:
    """What one side declares, as `equipment.declaring` takes it."""
    found = []
    for pair in case.tensors:
        if side is Side.TRAINER:
            shape, dtype, held = pair.trainers_shape, pair.trainers_dtype, pair.source
        else:
            shape, dtype, held = pair.shape, pair.dtype, pair.target
        found.append((TensorSpec(pair.name, shape, dtype), declared(held, shape)))
    return found
