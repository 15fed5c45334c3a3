"""Hypothesis strategies for layouts and whole refits of small tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from equipment.declaring import Refit, refit
from nemo_rl_reshard.layout import Mesh, Placement, Region, Replicate, Shard, StridedShard, TensorLayout
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.topology import Topology

SIZES = (1, 2, 3, 5, 7, 8, 12)
NAMES = (
    "model.layers.{}.mlp.up_proj.weight",
    "model.layers.{}.mlp.experts.0.down_proj.weight",
    "model.layers.{}.self_attn.q_proj.weight",
)


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to 3 dims, uneven sizes included."""
    return st.lists(st.sampled_from(SIZES), min_size=0, max_size=3).map(tuple)


@st.composite
def meshes(draw: st.DrawFn, ranks: Sequence[int]) -> Mesh:
    """A mesh of one to three axes over all `ranks`, in any order."""
    left, sizes = len(ranks), []
    while left > 1 and len(sizes) < 2:
        size = draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0]))
        sizes.append(size)
        left //= size
    sizes.append(left)
    return Mesh(tuple(f"axis{i}" for i in range(len(sizes))), tuple(sizes), tuple(draw(st.permutations(list(ranks)))))


@st.composite
def mesh_layouts(draw: st.DrawFn, shape: tuple[int, ...], ranks: Sequence[int]) -> TensorLayout:
    """A layout from a mesh: replicated, sharded, strided with later axes inside it, or strided alone."""
    mesh = draw(meshes(ranks))
    placements: list[Placement] = []
    for axis in reversed(range(len(mesh.shape))):
        rules: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for dim in range(len(shape)):
            later = [
                mesh.shape[axis + 1 + index]
                for index, rule in enumerate(placements)
                if not isinstance(rule, Replicate) and rule.dim == dim and mesh.shape[axis + 1 + index] > 1
            ]
            rules.append(StridedShard(dim, prod(later) if later else draw(st.sampled_from([2, 3]))))
        placements.insert(0, draw(st.sampled_from(rules)))
    return TensorLayout.from_mesh(shape, mesh, tuple(placements))


@st.composite
def free_needs(draw: st.DrawFn, shape: tuple[int, ...], ranks: Sequence[int]) -> TensorLayout:
    """Needs that no mesh describes: one arbitrary box per rank, or two that split it; gaps and overlaps allowed."""
    regions: dict[int, list[Region]] = {}
    for rank in ranks:
        offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
        extent = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, offset, strict=True))
        box = Region(offset, extent)
        wide = [dim for dim, size in enumerate(extent) if size > 1]
        regions[rank] = list(box.split(draw(st.sampled_from(wide)), 2)) if wide and draw(st.booleans()) else [box]
    return TensorLayout.from_regions(shape, regions)


@st.composite
def refits(draw: st.DrawFn, policy: RoutePolicy = RoutePolicy.ALL) -> Refit:
    """A planned refit of one to six small tensors between one to nine ranks, some of which may be on both sides."""
    num_sources, num_targets = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_shared = draw(st.sampled_from([0, 0, *range(1, min(num_sources, num_targets) + 1)]))
    everyone = list(range(num_sources + num_targets - num_shared))
    sources, targets = everyone[:num_sources], everyone[num_sources - num_shared :]
    tensors = []
    for index in range(draw(st.integers(1, 3))):
        shape = draw(shapes())
        given = draw(mesh_layouts(shape, sources))
        wanted = draw(st.one_of(mesh_layouts(shape, targets), free_needs(shape, targets)))
        for copy in range(draw(st.integers(1, 2))):
            name = draw(st.sampled_from(NAMES)).format(2 * index + copy)
            tensors.append((TensorSpec(name, shape, draw(st.sampled_from(["float32", "bfloat16"]))), given, wanted))
    mixed = draw(st.permutations(everyone))
    size = draw(st.sampled_from([0, 2, 3, 9]))
    domains = tuple(tuple(mixed[i : i + size]) for i in range(0, len(mixed), size)) if size else ()
    options = PlanOptions(draw(st.sampled_from([8, 48, 200, 1 << 20])), draw(st.sampled_from([8, 64, 1 << 20])))
    return refit(tensors, sources, targets, Topology(domains=domains), options, policy, colocated=num_shared > 0)
