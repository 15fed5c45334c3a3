"""The published rows as data, all eleven with layouts that their models take, and how well the simulator tells them."""

from statistics import median

import pytest

from nemo_rl_reshard.cli.hf_model import preset_names, read_model
from nemo_rl_reshard.simulate.baselines import simulate_gather_broadcast, simulate_published
from nemo_rl_reshard.simulate.constants import FITTED
from nemo_rl_reshard.simulate.published import CHECKS, FITTED_ROWS, ROWS, Basis, Design
from nemo_rl_reshard.topology import MACHINES

PUBLISHED = {
    (Design.GATHER_BROADCAST, "qwen3-235b-a22b", "dgx-h100"): (6.4, 6.4),
    (Design.GATHER_BROADCAST, "deepseek-v3", "dgx-h100"): (14.9, 14.9),
    (Design.GATHER_BROADCAST, "deepseek-v3", "gb200-nvl72"): (6.1, 6.1),
    (Design.GATHER_BROADCAST, "nemotron-ultra-550b", "gb200-nvl72"): (8.2, 8.2),
    (Design.RESHARD, "qwen3-235b-a22b", "dgx-h100"): (1.9, 1.9),
    (Design.RESHARD, "deepseek-v3", "dgx-h100"): (2.6, 2.6),
    (Design.RESHARD, "deepseek-v3", "gb200-nvl72"): (2.3, 2.3),
    (Design.RESHARD, "nemotron-ultra-550b", "gb200-nvl72"): (2.3, 2.3),
    (Design.RESHARD, "qwen3.8-2.4t", "gb200-nvl72"): (4.3, 4.3),
    (Design.RESHARD, "qwen3-30b-a3b", "dgx-h100"): (0.74, 1.00),
    (Design.RESHARD, "qwen3.5-397b", "dgx-h100"): (1.97, 2.17),
}


def test_all_published_rows_are_there():
    assert {(row.design, row.model, row.layout.machine): (row.low_s, row.high_s) for row in ROWS} == PUBLISHED
    assert len(ROWS) == len(PUBLISHED)


def test_every_row_says_where_it_comes_from_and_what_is_assumed():
    for row in (*ROWS, *CHECKS):
        assert row.source
        assert row.layout.note
        assert row.layout.basis in Basis
        assert row.model in preset_names()
        assert row.layout.machine in MACHINES


def test_the_fit_never_sees_a_guessed_layout_or_a_check():
    assert set(FITTED_ROWS) < set(ROWS)
    assert not set(CHECKS) & set(ROWS)
    assert {row.model for row in ROWS} - {row.model for row in FITTED_ROWS} == {"qwen3.8-2.4t"}


@pytest.mark.slow
def test_the_simulator_tells_the_published_rows_within_a_quarter():
    pytest.importorskip("transformers")
    models = {name: read_model({"preset": name}) for name in {row.model for row in ROWS}}
    errors = []
    for row in ROWS:
        model = models[row.model]
        sides = row.layout.sides(model)
        if row.design is Design.RESHARD:
            found = simulate_published(*sides, FITTED, architecture=model.architecture)
        else:
            found = simulate_gather_broadcast(*sides, FITTED)
        assert sum(found.phases.values()) == pytest.approx(found.seconds)
        errors.append(abs(found.seconds / row.seconds - 1))
    assert median(errors) <= 0.25
