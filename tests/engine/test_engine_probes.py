"""Single engines: caches, names the loader does not know, tied heads, a refit that stops half way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

# The first test waits for all probes.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROBES = ("prefix_cache", "wrong_names", "tied_head", "untied_by_checkpoint", "abandoned", "too_narrow")


@pytest.fixture
def probe(findings: Callable[..., dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """What a probe of a stock (packing) engine answered."""
    return lambda name: findings(PROBES, False, name, "engine_probes.py")


def test_a_long_prompt_needs_the_prefix_cache_reset_b66(probe: Callable[[str], dict[str, Any]]) -> None:
    """B66: a prompt longer than a block is answered from the old weights' cache until the caches are reset."""
    found = probe("prefix_cache")
    assert abs(found["stale"] - found["fresh"]) > 1e-3
    assert found["reset"] == found["fresh"]
    assert found["versions"] == [None, 7]


def test_a_prefix_with_a_typo_loads_nothing_b54(probe: Callable[[str], dict[str, Any]]) -> None:
    answer = probe("wrong_names")["typo"]
    assert "the loader takes none of the 25 tensors" in answer
    assert "modle.layers.1.mlp.down_proj.weight: refused by the loader" in answer
    assert "parameter model.norm.weight: 64 of 64 elements are filled by no tensor" in answer


def test_a_tower_the_engine_lacks_is_refused_by_name_b22(probe: Callable[[str], dict[str, Any]]) -> None:
    answer = probe("wrong_names")["tower"]
    assert "1 fault" in answer
    assert "model.visual.blocks.0.mlp.gate_proj.weight: refused by the loader" in answer


def test_a_missing_tensor_leaves_its_half_unfilled_b22(probe: Callable[[str], dict[str, Any]]) -> None:
    answer = probe("wrong_names")["missing"]
    assert "1 fault" in answer
    assert "parameter model.layers.0.mlp.gate_up_proj.weight: 6144 of 12288 elements" in answer


def test_draft_tensors_are_left_out_b17(probe: Callable[[str], dict[str, Any]]) -> None:
    assert probe("wrong_names")["draft"] == "took 25 of 26, skipped ['mtp.layers.0.mlp.down_proj.weight']"


def test_a_padded_vocabulary_is_refused_b35(probe: Callable[[str], dict[str, Any]]) -> None:
    assert "lm_head.weight: refused by the loader: AssertionError" in probe("wrong_names")["padded"]


def test_refused_declarations_leave_the_engine_as_it_was(probe: Callable[[str], dict[str, Any]]) -> None:
    assert probe("wrong_names")["still the same"] is True


def test_a_tied_head_must_agree_b33_b34(probe: Callable[[str], dict[str, Any]]) -> None:
    found = probe("tied_head")
    assert list(found["indirect"]) == ["lm_head.weight"]
    assert found["equal"] is True
    assert "lm_head.weight differs from model.embed_tokens.weight" in found["different"]
    assert found["version"] is None
    assert found["healed"] is True


def test_a_head_of_its_own_is_written_whatever_the_configuration_says_b33(
    probe: Callable[[str], dict[str, Any]],
) -> None:
    assert probe("untied_by_checkpoint") == {
        "name": "untied_by_checkpoint",
        "own parameter": True,
        "head": True,
        "tokens": True,
    }


def test_an_abandoned_refit_is_healed_by_a_full_one_b63(probe: Callable[[str], dict[str, Any]]) -> None:
    found = probe("abandoned")
    assert "38 tensors never arrived" in found["half"]
    assert "was not processed" in found["half"]
    assert found["healed"] is True
    assert found["version"] == 2


def test_the_kernel_refuses_a_narrow_model_b78(probe: Callable[[str], dict[str, Any]]) -> None:
    """B78: in this release a hidden size that the kernel cannot pack stops the engine; no other branch is taken."""
    found = probe("too_narrow")
    assert found["started"] is False
    assert "No Unquantized MoE backend" in found["why"]
