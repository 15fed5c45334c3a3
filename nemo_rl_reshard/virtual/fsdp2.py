"""FSDP2 trainers: DTensors on a mesh of dp_replicate, dp_shard and tp, experts on one of ep_shard and ep."""

from __future__ import annotations

from collections.abc import Hashable

from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.layout import Mesh, Placement, Replicate, Shard, StridedShard, TensorLayout
from nemo_rl_reshard.layout.placement import chunk
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.virtual.assembly import assemble
from nemo_rl_reshard.virtual.layout_table import LayoutTable, whole
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.places import Place
from nemo_rl_reshard.virtual.roles import EXPERTS, ROWS, Role, roles_of
from nemo_rl_reshard.virtual.sizes import are_positive, note_remainder, note_unequal, num_experts

_COLUMNS = frozenset(
    {Role.TOKENS, Role.HEAD, Role.QUERY, Role.KEY_VALUE, Role.COLUMN, Role.SHARED_COLUMN},
)
# The usual plans of tensor parallelism leave these layers whole on every rank.
_LEFT_WHOLE = frozenset({"linear_attn.out_proj.weight", "mixer.out_proj.weight"})


def fsdp2_source(
    model: ModelShape,
    *,
    world: int,
    dp_replicate: int = 1,
    dp_shard: int,
    tp: int = 1,
    ep: int = 1,
    first_rank: int = 0,
) -> Catalog:
    """What `world` FSDP2 ranks hold, tp fastest, then dp_shard, then dp_replicate.

    Tensor parallelism cuts first, and FSDP cuts dim 0 of what is left: a strided shard where both cut dim 0. With
    `ep` 1 the experts of a layer are one stacked tensor, whose dim 0 is the expert. With more, experts are dealt over
    ep, and dim 1 of each is cut over the other data ranks (ep_shard). Tensor parallelism leaves experts whole. All
    cuts are torch.chunk's: uneven ones are fine. Raises ConfigError listing every size that does not fit.
    """
    placed = roles_of(model)
    faults = FaultList(f"fsdp2 source of {model.name}", ConfigError)
    if are_positive(faults, world=world, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, ep=ep):
        note_unequal(faults, world, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
        note_remainder(faults, "ep", ep, "the data ranks dp_replicate * dp_shard =", dp_replicate * dp_shard)
        experts = num_experts(placed)
        if ep > max(1, experts):
            faults.add(f"ep {ep}: the model has {experts} experts a layer")
    faults.raise_if_any()
    ranks = tuple(range(first_rank, first_rank + world))
    dense = Mesh(("dp_replicate", "dp_shard", "tp"), (dp_replicate, dp_shard, tp), ranks)
    moe = Mesh(("ep_shard", "ep", "tp"), (dp_replicate * dp_shard // ep, ep, tp), ranks)
    rule = _Rule(dense, moe, experts)
    return assemble(Side.TRAINER, model, placed, ranks, rule.seat, rule.lay_out)


class _Rule:
    """Lays out one tensor after the other on the meshes of one trainer."""

    def __init__(self, dense: Mesh, moe: Mesh, experts: int) -> None:
        self._dense, self._moe, self._experts = dense, moe, experts
        self._table = LayoutTable()
        _, shards, tp = dense.shape
        # The mesh axis that experts are dealt over, and how many ranks lie between its neighbours.
        self._parts, self._step = (moe.shape[1], tp) if moe.shape[1] > 1 else (shards, tp)

    def seat(self, place: Place, role: Role) -> Hashable:
        """Which expert coordinate holds the tensor; None for what is no expert."""
        return self._coordinate(place) if role in EXPERTS else None

    def lay_out(self, spec: TensorSpec, place: Place, role: Role) -> TensorLayout:
        """The layout of one tensor."""
        if role not in EXPERTS:
            return self._table.placed(spec.shape, self._dense, self._placements(place, role))
        at = self._coordinate(place)
        ranks = tuple(rank for index, rank in enumerate(self._dense.ranks) if index // self._step % self._parts == at)
        ep_shard, ep, tp = self._moe.shape
        if ep == 1:
            return self._table.cut(spec.shape, *whole(ranks))
        mesh = Mesh(("ep_shard", "tp"), (ep_shard, tp), ranks)
        return self._table.placed(spec.shape, mesh, (Shard(1), Replicate()))

    def _placements(self, place: Place, role: Role) -> tuple[Placement, ...]:
        tp = self._dense.shape[2]
        if role in _COLUMNS:
            return Replicate(), StridedShard(0, tp), Shard(0)
        if role in ROWS and place.part not in _LEFT_WHOLE:
            return Replicate(), Shard(0), Shard(1)
        return Replicate(), Shard(0), Replicate()

    def _coordinate(self, place: Place) -> int:
        """Where on the expert axis torch.chunk puts the expert."""
        if place.expert is None:
            return 0
        _, length = chunk(self._experts, self._parts, 0)
        return place.expert // length
