"""The cut of each role under tensor parallelism, as far as trainers and engines agree on it."""

from __future__ import annotations

from nemo_rl_reshard.virtual.cuts import WHOLE, Cut, Section, even
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.roles import Role


def cut_of(role: Role, shape: tuple[int, ...], model: ModelShape) -> Cut:
    """How tensor parallelism cuts a tensor of `shape`. A vocabulary is cut as it is, without padding.

    Raises ConfigError if the configuration lacks a number that the cut depends on.
    """
    if role in {Role.COLUMN, Role.SHARED_COLUMN, Role.EXPERT_COLUMN, Role.TOKENS, Role.HEAD, Role.STATE_CHANNELS}:
        return even(shape, 0)
    if role in {Role.ROW, Role.SHARED_ROW, Role.EXPERT_ROW}:
        return even(shape, 1)
    if role is Role.QUERY:
        return even(shape, 0, model.number("num_attention_heads"))
    if role is Role.KEY_VALUE:
        return Cut(0, (Section(shape[0], model.number("num_key_value_heads", "num_attention_heads"), copied=True),))
    if role is Role.DELTA_VALUES:
        return even(shape, 0, model.number("linear_num_value_heads"))
    if role is Role.DELTA_GROUPS:
        return even(shape, 0, model.number("linear_num_key_heads"))
    if role is Role.DELTA_MIXED:
        return Cut(0, _delta_sections(model))
    if role is Role.STATE_HEADS:
        return even(shape, 0, model.number("mamba_num_heads"))
    if role is Role.STATE_MIXED:
        return Cut(0, _state_sections(model))
    if role is Role.STATE_INPUT:
        channels, *groups = _state_sections(model)
        heads = model.number("mamba_num_heads")
        return Cut(0, (channels, channels, *groups, Section(heads, heads)))
    return WHOLE


def _delta_sections(model: ModelShape) -> tuple[Section, ...]:
    """Query, key and value heads of a gated delta net, one after the other."""
    keys, values = model.number("linear_num_key_heads"), model.number("linear_num_value_heads")
    key = Section(keys * model.number("linear_key_head_dim"), keys)
    return key, key, Section(values * model.number("linear_value_head_dim"), values)


def _state_sections(model: ModelShape) -> tuple[Section, ...]:
    """Channels of all heads, then input and output groups of a state-space mixer."""
    heads, groups = model.number("mamba_num_heads"), model.number("n_groups")
    group = Section(groups * model.number("ssm_state_size"), groups, copied=groups == 1)
    return Section(heads * model.number("mamba_head_dim"), heads), group, group
