"""Pipeline stages: which layers each stage holds, by the rules of Megatron and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence


def early_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible, the first stages taking what is left over."""
    each, extra = divmod(layers, stages)
    return tuple(each + (stage < extra) for stage in range(stages))


def engine_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage as vLLM deals them: what is left over goes to the stages before the last, from the back."""
    each, extra = divmod(layers, stages)
    return tuple(each + (1 <= stages - 1 - stage <= extra) for stage in range(stages))


def stage_by_layer(stages: Sequence[int]) -> tuple[int, ...]:
    """The stage of each layer, given the number of layers per stage."""
    return tuple(stage for stage, count in enumerate(stages) for _ in range(count))
