"""Which layers each pipeline stage holds."""

from __future__ import annotations

import pytest

from nemo_rl_reshard.virtual.stages import early_stages, engine_stages, stage_by_layer


def test_trainers_give_what_is_left_over_to_the_first_stages_b29():
    """B29: DeepSeek-V3's 61 layers over 16 stages."""
    assert early_stages(61, 16) == (4,) * 13 + (3,) * 3
    assert early_stages(8, 4) == (2, 2, 2, 2)
    assert early_stages(2, 3) == (1, 1, 0)


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
