"""What holds of every catalog on paper: trainers hold all, no rank holds anything twice, equal layouts are one."""

from __future__ import annotations

import subprocess
import sys

import pytest
from equipment import virtual_models

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import gaps, overlaps
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.virtual.fsdp2 import fsdp2_source
from nemo_rl_reshard.virtual.megatron import megatron_source
from nemo_rl_reshard.virtual.vllm import vllm_target

MODELS = {
    "dense": virtual_models.dense(layers=3),
    "tied": virtual_models.dense(tied=True),
    "experts": virtual_models.experts(layers=3),
    "latent": virtual_models.latent(),
    "delta": virtual_models.delta(),
    "state space": virtual_models.state_space(),
}
SIDES = {
    "fsdp2": lambda model: fsdp2_source(model, world=12, dp_replicate=2, dp_shard=3, tp=2),
    "megatron": lambda model: megatron_source(model, world=8, tp=2, pp=2),
    "megatron, etp": lambda model: megatron_source(model, world=8, tp=2, etp=2),
    "vllm": lambda model: vllm_target(model, world=8, tp=2, dp=2, pp=2, first_rank=100),
    "vllm, one": lambda model: vllm_target(model, world=1, tp=1, first_rank=100),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", SIDES)
def test_a_side_holds_every_element_and_no_rank_holds_one_twice(side, name):
    catalog = SIDES[side](MODELS[name])
    assert list(catalog.specs) == [spec.name for spec in MODELS[name].specs]
    for tensor, layout in catalog.layouts.items():
        if tensor in catalog.indirect:
            continue
        assert layout.shape == catalog.specs[tensor].shape
        assert set(layout.ranks) <= set(catalog.ranks)
        assert gaps(Region.whole(layout.shape), [r for _, regions in layout.held for r in regions]) == (), tensor
        assert all(overlaps(regions) == () for _, regions in layout.held), tensor


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", SIDES)
def test_equal_layouts_are_one_object(side, name):
    layouts = SIDES[side](MODELS[name]).layouts.values()
    assert len({id(layout) for layout in layouts}) == len(set(layouts))


@pytest.mark.parametrize("name", MODELS)
def test_the_sides_match(name):
    model = MODELS[name]
    for side in ("fsdp2", "megatron"):
        check_match(SIDES[side](model), SIDES["vllm"](model))


def test_the_model_knows_its_bytes():
    model = virtual_models.model({"a": (3, 5), "b": ()})
    assert model.nbytes == 2 * 15 + 2


def test_sides_on_paper_import_no_framework():
    program = (
        "import sys, nemo_rl_reshard.virtual.fsdp2, nemo_rl_reshard.virtual.megatron, nemo_rl_reshard.virtual.vllm\n"
        "sys.exit(', '.join({'torch', 'transformers', 'vllm'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
