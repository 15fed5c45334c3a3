"""Attention heads as Megatron keeps them: queries, gates, key and value of each group in one weight."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_reshard.virtual.cuts import FusedCut
from nemo_rl_reshard.virtual.model import ModelShape

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class FusedHeads:
    """`heads` query heads of `size` rows in `groups`, one key/value head each; `gated`: each query has gate rows.

    A group's rows are its queries, then their gates, then its key, then its value. In a checkpoint the rows of a gated
    query projection are, head by head, the query's and then the gate's.
    """

    heads: int
    groups: int
    size: int
    gated: bool

    @classmethod
    def of(cls, model: ModelShape) -> FusedHeads | None:
        """Read from the projections of the first attention layer; None for a model without such projections."""
        rows: dict[str, int] = {}
        for spec in model.specs:
            kind = projection(spec.name)
            if kind is not None and spec.name.endswith(".weight"):
                rows.setdefault(kind, spec.shape[0])
            if len(rows) == len(_PROJECTIONS):
                break
        if len(rows) < len(_PROJECTIONS):
            return None
        heads = model.number("num_attention_heads")
        groups = model.number("num_key_value_heads", "num_attention_heads")
        size = rows["k_proj"] // groups
        return cls(heads, groups, size, gated=rows["q_proj"] == 2 * heads * size)

    def cut(self, kind: str) -> FusedCut:
        """Where the rows of the q, k or v projection lie in the one weight."""
        each, width = self.heads // self.groups, 1 + self.gated
        group_rows = (each * width + 2) * self.size
        if kind == "q_proj":
            stretches = [
                (
                    ((group * each + index) * width + half) * self.size,
                    group * group_rows + (half * each + index) * self.size,
                    self.size,
                )
                for group in range(self.groups)
                for index in range(each)
                for half in range(width)
            ]
        else:
            inside = (each * width + (kind == "v_proj")) * self.size
            stretches = [(group * self.size, group * group_rows + inside, self.size) for group in range(self.groups)]
        return FusedCut(self.groups * group_rows, tuple(stretches))


def projection(name: str) -> str | None:
    """`q_proj`, `k_proj` or `v_proj` of a tensor's name or part, or None for any other tensor."""
    kind = name.rpartition(".")[0].rpartition(".")[2]
    return kind if kind in _PROJECTIONS else None
