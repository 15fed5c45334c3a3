"""The names of vLLM that targets/ leans on exist in the installed release, and a missing one is said clearly."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.targets import vllm_compat
from nemo_rl_reshard.targets.vllm_front import publish_version, published_version, reset_caches

pytest.importorskip("vllm", exc_type=ImportError)

from equipment import stub_engine


def test_every_name_is_there_with_the_arguments_we_give() -> None:
    names = stub_engine.vllm_names()
    assert names.version.startswith(vllm_compat.TESTED_RELEASES)
    for function, parameters in (
        (names.layer_record, ["layer"]),
        (names.process_layer, ["layer", "info"]),
        (names.place_kernel_tensors, ["layer", "info"]),
        (names.restore_on_meta, ["layer", "info"]),
        (names.materialize, ["layer", "info"]),
        (names.params_and_buffers, ["layer"]),
    ):
        assert list(inspect.signature(function).parameters) == parameters
    assert {"_expert_map", "e_score_correction_bias"} <= names.never_parked


def test_missing_names_are_listed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_engine.vllm_names()
    monkeypatch.setitem(vllm_compat._NAMES, "process_layer", ("vllm.config", "no_such_name"))
    monkeypatch.setitem(vllm_compat._NAMES, "platform", ("vllm.no_such_module", "current_platform"))
    with pytest.raises(TargetError) as caught:
        vllm_compat.find_names()
    assert "lacks names that exist in 0.25 and 0.32: 2 faults" in str(caught.value)
    assert "vllm.config.no_such_name" in str(caught.value)
    assert "vllm.no_such_module.current_platform" in str(caught.value)


def test_the_front_end_has_what_a_refit_needs() -> None:
    from vllm import LLM

    for name in ("reset_prefix_cache", "reset_mm_cache"):
        assert callable(getattr(LLM, name))


def test_a_prefix_cache_that_stays_is_an_error_b66() -> None:
    """B66: an engine with requests in flight keeps its cache; a refit must not pass that over."""
    versions: list[str] = []
    engine = SimpleNamespace(reset_encoder_cache=lambda: None)
    busy = SimpleNamespace(reset_prefix_cache=lambda: False, llm_engine=engine)
    with pytest.raises(TargetError, match="keeps its prefix cache"):
        reset_caches(busy)
    idle = SimpleNamespace(
        reset_prefix_cache=lambda: True,
        llm_engine=engine,
        update_weight_version=versions.append,
        get_weight_version=lambda: versions[-1] if versions else "default",
    )
    reset_caches(idle)
    assert published_version(idle) is None
    publish_version(idle, 3)
    assert published_version(idle) == 3
