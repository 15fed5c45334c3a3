"""Pipeline stages: which layers each stage holds, by the rules of Megatron and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence


def trainer_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage as Megatron can be told in two numbers: equally many on all stages but the first and the last.

    What does not divide evenly is made up for by these two, the first having one more if need be.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    each = -(-layers // stages)
    if layers - each * (stages - 2) < 2:
        each -= 1
    ends = layers - each * (stages - 2)
    return (ends - ends // 2, *(each,) * (stages - 2), ends // 2)


def engine_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage as vLLM deals them: what is left over goes to the stages before the last, from the back."""
    each, extra = divmod(layers, stages)
    return tuple(each + (1 <= stages - 1 - stage <= extra) for stage in range(stages))


def stage_by_layer(stages: Sequence[int]) -> tuple[int, ...]:
    """The stage of each layer, given the number of layers per stage."""
    return tuple(stage for stage, count in enumerate(stages) for _ in range(count))
