"""vLLM engines: where the shares of each checkpoint tensor go, as vLLM's own loaders put them."""

from __future__ import annotations

from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.layout import TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.virtual.assembly import assemble
from nemo_rl_reshard.virtual.cuts import WHOLE, Cut, Section
from nemo_rl_reshard.virtual.layout_table import LayoutTable, Owners, is_divisible
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.places import Place
from nemo_rl_reshard.virtual.role_cuts import cut_of
from nemo_rl_reshard.virtual.roles import EXPERTS, OUTSIDE_LAYERS, Role, roles_of
from nemo_rl_reshard.virtual.sizes import are_positive, note_unequal, num_experts, num_layers
from nemo_rl_reshard.virtual.stages import engine_stages, stage_by_layer

_VOCABULARY_PADDING = 64
_EVERYWHERE = {
    **dict.fromkeys(("MixtralForCausalLM", "NemotronHForCausalLM", "Qwen3MoeForCausalLM"), OUTSIDE_LAYERS),
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), frozenset({Role.TOKENS})),
    "Qwen3NextForCausalLM": frozenset({Role.TOKENS, Role.HEAD}),
}
"""What vLLM's model of an architecture keeps on every pipeline stage, used there or not."""
_FLOAT32 = dict.fromkeys(
    (
        "mlp.gate.e_score_correction_bias",
        "linear_attn.A_log",
        "mixer.gate.weight",
        "mixer.gate.e_score_correction_bias",
        "mixer.A_log",
    ),
    "float32",
)
"""Parts that the engine keeps in float32 whatever the model's dtype."""
_INDIRECT = {"mixer.A_log": "the engine keeps the negative exponential of it"}
_SHARED = frozenset({Role.SHARED_COLUMN, Role.SHARED_ROW})

_Seat = tuple[tuple[int, ...], int]  # the stages that hold a tensor, the EP rank of its expert (-1: no such)


def vllm_target(
    model: ModelShape, *, world: int, tp: int, dp: int = 1, ep: int = 1, pp: int = 1, first_rank: int
) -> Catalog:
    """What `world` ranks of vLLM need: `dp` engines of tp * pp ranks, tp fastest.

    Key/value heads are copied when tp exceeds them; the vocabulary is padded to a multiple of 64 and cut; norms,
    routers and the small latent projections are whole on each rank. Experts are cut over tp when `ep` is 1, else dealt
    whole, linearly, over the ep ranks: those of one engine, or, with ep a multiple of tp, those of ep / tp engines
    that work as one group (whose shared experts vLLM keeps whole on each rank, as tokens are divided there). Layers
    are dealt over stages as vLLM deals them. Raises ConfigError listing every size that does not fit.
    """
    placed = roles_of(model)
    faults = FaultList(f"vllm target of {model.name}", ConfigError)
    layers, experts = num_layers(placed), num_experts(placed)
    if are_positive(faults, world=world, tp=tp, dp=dp, ep=ep, pp=pp):
        note_unequal(faults, world, tp=tp, dp=dp, pp=pp)
        if ep > 1 and (ep % tp or dp % max(1, ep // tp)):
            faults.add(f"ep {ep}: must be 1, or tp {tp} times a divisor of dp {dp}")
        elif ep > 1 and experts < ep:
            faults.add(f"ep {ep}: the model has {experts} experts a layer")
        if pp > layers:
            faults.add(f"pp {pp}: the model has {layers} layers")
    faults.raise_if_any()
    grid = _Grid(tp, dp, ep, pp, first_rank)
    rule = _Rule(model, grid, stage_by_layer(engine_stages(layers, pp)), experts, faults)
    ranks = range(first_rank, first_rank + world)
    catalog = assemble(
        Side.INFERENCE, model, placed, ranks, rule.seat, rule.lay_out, dtypes=_FLOAT32, indirect=_INDIRECT
    )
    faults.raise_if_any()
    return catalog


class _Grid:
    """Which ranks have which part: engine after engine, stage after stage, tp fastest."""

    def __init__(self, tp: int, dp: int, ep: int, pp: int, first_rank: int) -> None:
        self.tp, self.ep = tp, ep
        self._dp, self._pp, self._first = dp, pp, first_rank

    def parallel(self, stages: tuple[int, ...]) -> Owners:
        """Ranks by their place in the tensor-parallel group."""
        return tuple(
            tuple(self._rank(engine, stage, part) for engine in range(self._dp) for stage in stages)
            for part in range(self.tp)
        )

    def expert(self, stage: int, owner: int) -> Owners:
        """The ranks that are number `owner` of their expert-parallel group."""
        inside, part = divmod(owner, self.tp)
        return (tuple(self._rank(engine, stage, part) for engine in range(inside, self._dp, self.ep // self.tp)),)

    def _rank(self, engine: int, stage: int, part: int) -> int:
        return self._first + (engine * self._pp + stage) * self.tp + part


class _Rule:
    """Lays out one tensor after the other; cuts that do not work out become faults."""

    def __init__(
        self, model: ModelShape, grid: _Grid, stages: tuple[int, ...], experts: int, faults: FaultList
    ) -> None:
        self._model, self._grid, self._stages, self._faults = model, grid, stages, faults
        self._table = LayoutTable()
        self._last = max(stages, default=0)
        self._tied = bool(model.config.get("tie_word_embeddings"))
        # The first ranks take one expert more where they cannot be dealt evenly.
        each, extra = divmod(experts, grid.ep)
        self._owner_of_expert = [owner for owner in range(grid.ep) for _ in range(each + (owner < extra))]

    def seat(self, place: Place, role: Role) -> _Seat:
        """Stages of a tensor, and who has its expert."""
        if place.layer is not None:
            stages: tuple[int, ...] = (self._stages[place.layer],)
        elif role in _EVERYWHERE.get(self._model.architecture, ()):
            stages = tuple(range(self._last + 1))
        elif role is not Role.TOKENS:
            stages = (self._last,)
        else:
            stages = (0, self._last) if self._tied and self._last else (0,)
        if self._grid.ep > 1 and role in EXPERTS and place.expert is not None:
            return stages, self._owner_of_expert[place.expert]
        return stages, -1

    def lay_out(self, spec: TensorSpec, place: Place, role: Role) -> TensorLayout:
        """The layout of one tensor."""
        stages, owner = self.seat(place, role)
        if owner >= 0:
            return self._table.cut(spec.shape, WHOLE, self._grid.expert(stages[0], owner))
        cut = self._cut(spec, role)
        if not is_divisible(self._faults, spec.name, role, cut, self._grid.tp, "tp"):
            cut = WHOLE
        return self._table.cut(spec.shape, cut, self._grid.parallel(stages))

    def _cut(self, spec: TensorSpec, role: Role) -> Cut:
        if role in {Role.TOKENS, Role.HEAD}:
            rows = spec.shape[0]
            padded = -(-rows // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
            return Cut(0, (Section(rows, rows, padded=padded),))
        # Sequence parallelism of a group of engines divides the tokens, not the shared experts.
        if role in _SHARED and self._grid.ep > self._grid.tp > 1:
            return WHOLE
        return cut_of(role, spec.shape, self._model)
