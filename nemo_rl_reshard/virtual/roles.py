"""Role: what a tensor is for in its model, told from its place. Layouts differ by role, not by name."""

from __future__ import annotations

from enum import StrEnum

from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.places import Place


class Role(StrEnum):
    """Roles of weights. COLUMN weights are cut along their outputs (dim 0), ROW weights along their inputs (dim 1)."""

    TOKENS = "token embedding"
    HEAD = "output head"
    FINAL_NORM = "final norm"
    WHOLE = "norm, router or other small weight"
    QUERY = "query heads"
    KEY_VALUE = "key or value heads"
    COLUMN = "feed-forward columns"
    ROW = "rows"
    SHARED_COLUMN = "shared expert columns"
    SHARED_ROW = "shared expert rows"
    EXPERT_COLUMN = "expert columns"
    EXPERT_ROW = "expert rows"
    DELTA_VALUES = "value heads of linear attention"
    DELTA_MIXED = "query, key and value heads of linear attention"
    DELTA_GROUPS = "groups of a key head of linear attention"
    STATE_HEADS = "heads of a state-space mixer"
    STATE_CHANNELS = "channels of a state-space mixer"
    STATE_MIXED = "channels and groups of a state-space mixer"
    STATE_INPUT = "gate, channels, groups and heads of a state-space mixer"


Placed = tuple[tuple[Place, Role], ...]
"""Place and role of every tensor of a model, in its order."""

EXPERTS = frozenset({Role.EXPERT_COLUMN, Role.EXPERT_ROW})
ROWS = frozenset({Role.ROW, Role.SHARED_ROW, Role.EXPERT_ROW})
OUTSIDE_LAYERS = frozenset({Role.TOKENS, Role.HEAD, Role.FINAL_NORM})

_OUTSIDE = {
    "embed_tokens": Role.TOKENS,
    "embeddings": Role.TOKENS,
    "lm_head": Role.HEAD,
    "norm": Role.FINAL_NORM,
    "norm_f": Role.FINAL_NORM,
}

_FEED_FORWARD = {"gate_proj": Role.COLUMN, "up_proj": Role.COLUMN, "down_proj": Role.ROW}
_SHARED = {"gate_proj": Role.SHARED_COLUMN, "up_proj": Role.SHARED_COLUMN, "down_proj": Role.SHARED_ROW}
_EXPERT = {"gate_proj": Role.EXPERT_COLUMN, "up_proj": Role.EXPERT_COLUMN, "down_proj": Role.EXPERT_ROW}
_MIXTRAL_EXPERT = {"w1": Role.EXPERT_COLUMN, "w3": Role.EXPERT_COLUMN, "w2": Role.EXPERT_ROW}
_ATTENTION = {
    "q_proj": Role.QUERY,
    "k_proj": Role.KEY_VALUE,
    "v_proj": Role.KEY_VALUE,
    "o_proj": Role.ROW,
    # Latent attention: what leads into the small latent space is whole, what leads out of it has heads.
    "q_a_proj": Role.WHOLE,
    "kv_a_proj_with_mqa": Role.WHOLE,
    "q_b_proj": Role.QUERY,
    "kv_b_proj": Role.QUERY,
}
_DELTA = {
    "in_proj_qkv": Role.DELTA_MIXED,
    "conv1d": Role.DELTA_MIXED,
    # Qwen3-Next keeps the rows of a key head and its value heads together, where Qwen3.5 has sections.
    "in_proj_qkvz": Role.DELTA_GROUPS,
    "in_proj_ba": Role.DELTA_GROUPS,
    "in_proj_z": Role.DELTA_VALUES,
    "in_proj_b": Role.DELTA_VALUES,
    "in_proj_a": Role.DELTA_VALUES,
    "A_log": Role.DELTA_VALUES,
    "dt_bias": Role.DELTA_VALUES,
    "out_proj": Role.ROW,
}
_STATE_SPACE = {
    "in_proj": Role.STATE_INPUT,
    "conv1d": Role.STATE_MIXED,
    "A_log": Role.STATE_HEADS,
    "D": Role.STATE_HEADS,
    "dt_bias": Role.STATE_HEADS,
    "norm": Role.STATE_CHANNELS,
    "out_proj": Role.ROW,
    "fc1_latent_proj": Role.WHOLE,
    "fc2_latent_proj": Role.WHOLE,
}
_ROLES: dict[str, dict[str, Role]] = {
    "mlp": _FEED_FORWARD,
    "mlp.shared_expert": _SHARED,
    "mlp.shared_experts": _SHARED,
    "mlp.experts": _EXPERT,
    "block_sparse_moe.experts": _MIXTRAL_EXPERT,
    "self_attn": _ATTENTION,
    "linear_attn": _DELTA,
    # One module name for every kind of layer: attention, state space, feed-forward and experts.
    "mixer": _FEED_FORWARD | _ATTENTION | _STATE_SPACE,
    "mixer.shared_experts": _SHARED,
    "mixer.experts": _EXPERT,
}
_ROUTERS = frozenset({"gate", "shared_expert_gate", "router", "e_score_correction_bias"})


def roles_of(model: ModelShape) -> Placed:
    """Place and role of every tensor, in model order.

    Raises one ConfigError that lists the kinds of tensors that no rule knows, each by its first name.
    """
    faults = FaultList(f"model {model.name} ({model.architecture})", ConfigError)
    known: dict[tuple[bool, str], Role | None] = {}
    found: list[tuple[Place, Role]] = []
    for spec in model.specs:
        place = Place.of(spec.name)
        key = (place.layer is None, place.part)
        if key not in known:
            known[key] = _role(place, len(spec.shape))
            if known[key] is None:
                faults.add(
                    f"{spec.name} {list(spec.shape)}: no rule says how trainers and engines lay out such a tensor"
                )
        role = known[key]
        if role is not None:
            found.append((place, role))
    faults.raise_if_any()
    return tuple(found)


def _role(place: Place, num_dims: int) -> Role | None:
    """The role of a tensor, or None where none is known. A norm is whole, and so is the bias of a sum over ranks."""
    body, leaf = _split_leaf(place.part)
    if place.layer is None:
        return _OUTSIDE.get(body)
    parent, _, last = body.rpartition(".")
    role = _ROLES.get(parent, {}).get(last)
    if role is not None:
        return Role.WHOLE if leaf == "bias" and role in ROWS else role
    if num_dims <= 1 or last in _ROUTERS:
        return Role.WHOLE
    return None


def _split_leaf(part: str) -> tuple[str, str]:
    """(name of the module, `weight` or `bias`); parameters with a name of their own have an empty leaf."""
    for leaf in ("weight", "bias"):
        if part.endswith(f".{leaf}"):
            return part.removesuffix(f".{leaf}"), leaf
    return part, ""
