"""The specs of published refits in configs/plans: what they state, and that the simulator has the same layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_rl_reshard.simulate.published import ROWS

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "configs" / "plans").glob("*.yaml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_specs_of_published_refits_say_what_is_stated_and_have_the_layout_that_is_simulated(path: Path) -> None:
    text = path.read_text()
    assert "Stated:" in text
    assert "ssumed:" in text or path.stem == "qwen3-30b-a3b-h100"
    plain = yaml.safe_load(text)
    source, target = plain["source"], plain["target"]
    found = [
        row
        for row in ROWS
        if row.model == plain["model"]["preset"] and row.layout.machine == plain["topology"]["preset"]
    ]
    assert found
    for layout in (row.layout for row in found):
        assert (layout.trainers, layout.engines) == (source["world"], target["world"])
        given = [source.get(key, 1) for key in ("tp", "pp", "ep")] + [target.get(key, 1) for key in ("tp", "dp", "ep")]
        wanted = [
            layout.source_tp,
            layout.source_pp,
            layout.source_ep,
            layout.target_tp,
            layout.target_dp,
            layout.target_ep,
        ]
        assert given == wanted
        assert (tuple(source["stages"]) if "stages" in source else None) == layout.stages


def test_every_published_layout_has_a_spec() -> None:
    plains = [yaml.safe_load(path.read_text()) for path in PLANS]
    assert {(plain["model"]["preset"], plain["topology"]["preset"]) for plain in plains} == {
        (row.model, row.layout.machine) for row in ROWS
    }
