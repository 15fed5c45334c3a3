"""Megatron trainers: pipeline stages of tensor-parallel ranks; experts by ep and etp across all ranks of a stage."""

from __future__ import annotations

from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.layout import TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.virtual.assembly import assemble
from nemo_rl_reshard.virtual.cuts import WHOLE, Cut, FusedCut, Section
from nemo_rl_reshard.virtual.fused_heads import FusedHeads, projection
from nemo_rl_reshard.virtual.layout_table import LayoutTable, Owners, is_divisible
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.places import Place
from nemo_rl_reshard.virtual.role_cuts import cut_of
from nemo_rl_reshard.virtual.roles import EXPERTS, Placed, Role, roles_of
from nemo_rl_reshard.virtual.sizes import are_positive, note_remainder, num_experts, num_layers
from nemo_rl_reshard.virtual.stages import stage_by_layer, trainer_stages

_Seat = tuple[tuple[int, ...], int]  # the stages that hold a tensor, the expert group (-1 for what is no expert)


def megatron_source(
    model: ModelShape,
    *,
    world: int,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int = 1,
    cp: int = 1,
    stages: tuple[int, ...] | None = None,
    vocab_multiple: int | None = None,
    first_rank: int = 0,
) -> Catalog:
    """What `world` Megatron ranks hold, tp fastest, then cp, then dp, pp slowest; dp = world / (tp * cp * pp).

    Dense weights are cut over tp and equal on all cp and dp ranks of a stage. Experts ignore that grid: within a
    stage, etp runs fastest, then ep, and what is left are copies. Query, key and value heads are one weight, by groups
    of a key/value head, cut evenly even inside a group when tp exceeds the groups. `stages` are layers per stage; by
    default equally many, but for the first and the last stage where pp does not divide the layers. The embedding is on
    the first stage (tied: on the last as well), final norm and head on the last. A vocabulary is as long as in the
    checkpoint, and tp divides it; with `vocab_multiple` it is padded at the end to a multiple of that times tp. Raises
    ConfigError listing every size that does not fit.
    """
    placed = roles_of(model)
    faults = FaultList(f"megatron source of {model.name}", ConfigError)
    layers, experts = num_layers(placed), num_experts(placed)
    if are_positive(faults, world=world, tp=tp, pp=pp, ep=ep, etp=etp, cp=cp):
        note_remainder(faults, "tp * cp * pp =", tp * cp * pp, "world", world)
        if world % pp == 0:
            note_remainder(faults, "ep * etp =", ep * etp, "the ranks of a stage, world / pp =", world // pp)
        note_remainder(faults, "ep", ep, "the experts of a layer,", experts or 1)
        if stages is None and pp > layers:
            faults.add(f"pp {pp}: the model has {layers} layers")
        _note_heads(faults, model, placed, tp, cp)
    if vocab_multiple is not None and vocab_multiple < 1:
        faults.add(f"vocab_multiple {vocab_multiple}: must be at least 1")
    if stages is not None and (len(stages) != pp or sum(stages) != layers or min(stages, default=0) < 0):
        faults.add(f"stages {list(stages)}: must be {pp} counts of layers that add up to {layers}")
    faults.raise_if_any()
    grid = _Grid(world // pp, tp, ep, etp, first_rank)
    staged = stage_by_layer(stages or trainer_stages(layers, pp))
    rule = _Rule(model, grid, staged, experts // ep or 1, vocab_multiple, faults)
    ranks = range(first_rank, first_rank + world)
    catalog = assemble(Side.TRAINER, model, placed, ranks, rule.seat, rule.lay_out)
    faults.raise_if_any()
    return catalog


def _note_heads(faults: FaultList, model: ModelShape, placed: Placed, tp: int, cp: int) -> None:
    """Note what tp, or tp and cp, must divide beyond the weights that are cut: whole heads, groups of them and states.

    A cut inside a group of heads is possible only where all its parts are of one group.
    """
    heads = FusedHeads.of(model)
    if heads is not None:
        note_remainder(faults, "tp", tp, "the query heads,", heads.heads)
        if heads.groups % tp and tp % heads.groups:
            faults.add(f"tp {tp}: is neither a divisor nor a multiple of the key/value heads, {heads.groups}")
    roles = {role for _, role in placed}
    if Role.STATE_INPUT in roles:
        note_remainder(faults, "tp", tp, "the groups of the state-space mixer,", model.number("n_groups"))
    if roles & {Role.DELTA_MIXED, Role.DELTA_GROUPS}:
        heads_of_keys = model.number("linear_num_key_heads")
        note_remainder(faults, "tp * cp =", tp * cp, "the key heads of linear attention,", heads_of_keys)


class _Grid:
    """Who owns which part: `size` ranks a stage, cut in two unrelated ways."""

    def __init__(self, size: int, tp: int, ep: int, etp: int, first_rank: int) -> None:
        self.tp, self.etp = tp, etp
        self._size, self._ep, self._first = size, ep, first_rank

    def dense(self, stages: tuple[int, ...]) -> Owners:
        """Owners of the tp parts of a dense weight of these stages."""
        return tuple(
            tuple(
                self._first + stage * self._size + index
                for stage in stages
                for index in range(part, self._size, self.tp)
            )
            for part in range(self.tp)
        )

    def expert(self, stage: int, group: int) -> Owners:
        """Owners of the etp parts of an expert of this group."""
        first = self._first + stage * self._size
        start, step = first + group * self.etp, self.etp * self._ep
        return tuple(tuple(range(start + part, first + self._size, step)) for part in range(self.etp))


class _Rule:
    """Lays out one tensor after the other; cuts that do not work out become faults."""

    def __init__(
        self,
        model: ModelShape,
        grid: _Grid,
        stages: tuple[int, ...],
        experts_each: int,
        vocab_multiple: int | None,
        faults: FaultList,
    ) -> None:
        self._model, self._grid, self._stages, self._faults = model, grid, stages, faults
        self._experts_each, self._vocab_multiple = experts_each, vocab_multiple
        self._table = LayoutTable()
        self._heads = FusedHeads.of(model)
        self._last = max(stages, default=0)
        self._tied = bool(model.config.get("tie_word_embeddings"))

    def seat(self, place: Place, role: Role) -> _Seat:
        """Stages and expert group of a tensor."""
        if place.layer is not None:
            group = place.expert // self._experts_each if place.expert is not None and role in EXPERTS else -1
            return (self._stages[place.layer],), group
        if role is Role.TOKENS:
            return ((0, self._last) if self._tied and self._last else (0,)), -1
        return (self._last,), -1

    def lay_out(self, spec: TensorSpec, place: Place, role: Role) -> TensorLayout:
        """The layout of one tensor."""
        stages, group = self.seat(place, role)
        cut = self._cut(spec, place, role)
        if role in EXPERTS:
            owners, size = self._grid.expert(stages[0], group), "etp"
        else:
            owners, size = self._grid.dense(stages), "tp"
        if not is_divisible(self._faults, spec.name, role, cut, len(owners), size):
            cut = WHOLE
        return self._table.cut(spec.shape, cut, owners)

    def _cut(self, spec: TensorSpec, place: Place, role: Role) -> Cut | FusedCut:
        if role in {Role.TOKENS, Role.HEAD}:
            rows, multiple = spec.shape[0], (self._vocab_multiple or 0) * self._grid.tp
            return Cut(0, (Section(rows, rows, padded=-(-rows // multiple) * multiple if multiple else rows),))
        kind = projection(place.part)
        if self._heads is not None and kind is not None:
            return self._heads.cut(kind)
        return cut_of(role, spec.shape, self._model)
