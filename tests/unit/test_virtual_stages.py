"""Which layers each pipeline stage holds."""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from nemo_rl_reshard.virtual.stages import engine_stages, stage_by_layer, trainer_stages


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, (2, 2, 2, 2)),
        (61, 16, (3, *(4,) * 14, 2)),
        (61, 8, (7, *(8,) * 6, 6)),
        (94, 8, (11, *(12,) * 6, 11)),
        (94, 4, (23, 24, 24, 23)),
        (60, 8, (6, *(8,) * 6, 6)),
        (78, 8, (9, *(10,) * 6, 9)),
        (27, 4, (7, 7, 7, 6)),
        (27, 2, (14, 13)),
        (7, 6, (2, 1, 1, 1, 1, 1)),
        (5, 1, (5,)),
    ],
)
def test_trainers_make_up_for_a_remainder_on_the_first_and_the_last_stage_b29(layers, stages, expected):
    """B29: what the recipes of NeMo RL set as num_layers_in_first_ and num_layers_in_last_pipeline_stage."""
    assert trainer_stages(layers, stages) == expected


def test_every_layer_has_a_stage_and_every_stage_a_layer():
    for stages, layers in combinations_with_replacement(range(1, 100), 2):
        found = trainer_stages(layers, stages)
        assert (len(found), sum(found)) == (stages, layers)
        assert min(found) >= 1
        assert len(set(found[1:-1])) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, (2, 2, 2, 2)),
        (5, 2, (3, 2)),
        (5, 3, (2, 2, 1)),
        (9, 4, (2, 2, 3, 2)),
        (11, 4, (3, 3, 3, 2)),
        (61, 16, (3, 3, *(4,) * 13, 3)),
    ],
)
def test_engines_give_it_to_the_stages_before_the_last_b29(layers, stages, expected):
    """B29: vLLM's own dealing, which leaves the last stage, and then the first, alone."""
    assert engine_stages(layers, stages) == expected
    assert sum(expected) == layers


def test_layers_know_their_stage():
    assert stage_by_layer((2, 0, 1)) == (0, 0, 2)
