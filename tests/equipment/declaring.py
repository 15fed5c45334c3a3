"""Declarations for tests of the core: manifests, catalogs and plans from layouts, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_reshard.layout import Mesh, Region, TensorLayout, parse_placement
from nemo_rl_reshard.params.catalog import Catalog, merge
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import Route, RoutePolicy, decide_routes
from nemo_rl_reshard.params.shard import LocalShard, StorageView
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import Plan, PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.topology import Topology

GATE = "model.layers.0.mlp.gate_proj.weight"


def layout(shape: Sequence[int], mesh: Sequence[int], placements: str, ranks: Iterable[int]) -> TensorLayout:
    """A layout from a mesh shape, placements written like "SS(0,2) S(0)" and row-major ranks."""
    axes = tuple(f"axis{index}" for index in range(len(mesh)))
    rules = tuple(parse_placement(text) for text in placements.split())
    return TensorLayout.from_mesh(tuple(shape), Mesh(axes, tuple(mesh), tuple(ranks)), rules)


def rows(shape: Sequence[int], per_rank: Mapping[int, Iterable[tuple[int, int]]]) -> TensorLayout:
    """A layout of row blocks: rank -> (first row, number of rows)."""
    rest = tuple(shape[1:])
    return TensorLayout.from_regions(
        tuple(shape),
        {
            rank: [Region((start, *[0] * len(rest)), (count, *rest)) for start, count in blocks]
            for rank, blocks in per_rank.items()
        },
    )


def shard_of(tensor: str, region: Region) -> LocalShard:
    """A shard kept contiguously in a local tensor of the same name."""
    stride: list[int] = []
    step = 1
    for extent in reversed(region.extent):
        stride.insert(0, step)
        step *= extent
    return LocalShard(tensor, region, StorageView(tensor, 0, region.extent, tuple(stride)))


def manifests(
    side: Side,
    ranks: Iterable[int],
    tensors: Sequence[tuple[TensorSpec, TensorLayout]],
    indirect: Mapping[str, str] | None = None,
) -> list[Manifest]:
    """One manifest per rank; every rank names every spec, also those of which it holds nothing."""
    return [
        Manifest(
            rank,
            side,
            tuple(spec for spec, _ in tensors),
            tuple(shard_of(spec.name, region) for spec, found in tensors for region in found.regions_of(rank)),
            tuple((indirect or {}).items()),
        )
        for rank in ranks
    ]


def catalog(
    side: Side,
    ranks: Iterable[int],
    tensors: Sequence[tuple[TensorSpec, TensorLayout]],
    indirect: Mapping[str, str] | None = None,
) -> Catalog:
    """The merged manifests of one side."""
    return merge(manifests(side, ranks, tensors, indirect))


@dataclass(frozen=True)
class Refit:
    """Everything that a plan was made from, and the plan."""

    source: Catalog
    target: Catalog
    routes: Mapping[str, Route]
    topology: Topology
    plan: Plan

    @property
    def ranks(self) -> list[int]:
        """All ranks of the world."""
        return sorted({*self.source.ranks, *self.target.ranks})


def refit(
    tensors: Sequence[tuple[TensorSpec, TensorLayout, TensorLayout]],
    sources: Iterable[int],
    targets: Iterable[int],
    topology: Topology | None = None,
    options: PlanOptions | None = None,
    policy: RoutePolicy = RoutePolicy.ALL,
    colocated: bool = False,
) -> Refit:
    """Declare, match, route and plan tensors given as (spec, source layout, target layout)."""
    topology = topology or Topology()
    source = catalog(Side.TRAINER, sources, [(spec, given) for spec, given, _ in tensors])
    target = catalog(Side.INFERENCE, targets, [(spec, wanted) for spec, _, wanted in tensors])
    check_match(source, target, colocated=colocated)
    routes = decide_routes(source, target, policy)
    return Refit(source, target, routes, topology, make_plan(source, target, routes, topology, options))


def one_tensor(
    shape: Sequence[int],
    source: tuple[Sequence[int], str, Iterable[int]],
    target: tuple[Sequence[int], str, Iterable[int]],
    topology: Topology | None = None,
    options: PlanOptions | None = None,
    dtype: str = "float32",
) -> Refit:
    """A refit of one tensor; each side is (mesh shape, placements, row-major ranks)."""
    spec = TensorSpec(GATE, tuple(shape), dtype)
    given, wanted = layout(shape, *source), layout(shape, *target)
    return refit([(spec, given, wanted)], source[2], target[2], topology, options)
