"""The start-up check: every seam that is missing is named with what to do, all in one error."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from equipment.nemo_fakes import FakeCluster, FakeGeneration, FakePolicy

import nemo_rl_reshard
from nemo_rl_reshard.errors import ConfigError
from nemo_rl_reshard.integrations.nemo_rl.description import describe
from nemo_rl_reshard.integrations.nemo_rl.seams import DRIVER_SEAMS, cannot_run, check_seams, missing_seams


def generation(workers=("actor",)):
    return FakeGeneration(workers, [0], {"vllm_cfg": {"async_engine": True}}, tp=1)


def test_a_stock_driver_lacks_nothing():
    assert list(missing_seams({"policy": FakePolicy(["t"]), "generation": generation()})) == []


def test_every_missing_seam_is_named_with_its_fallback():
    with pytest.raises(ConfigError, match=f"{len(DRIVER_SEAMS)} faults") as failed:
        check_seams(SimpleNamespace(), SimpleNamespace(), (), within_s=1.0)
    for seam in DRIVER_SEAMS:
        assert f"{seam.path} is not there ({seam.why}): {seam.fallback}" in str(failed.value)


def test_actors_without_a_way_in_are_told_of_the_fallback_and_sizes_are_checked():
    with pytest.raises(ConfigError, match="4 faults") as failed:
        check_seams(FakePolicy([object()]), generation([object()]), (FakeCluster(2), FakeCluster(3)), within_s=1.0)
    text = str(failed.value)
    assert "the training cluster has 2 GPUs, and its worker group 1 ranks" in text
    assert "the inference cluster has 3 GPUs, and its worker group 1 ranks" in text
    assert "no __ray_call__" in text
    assert "ReshardPolicyMethods (nemo_rl_reshard/integrations/nemo_rl/worker_classes.py)" in text
    assert "engine actors have no checkpoint_engine_rpc_async" in text
    assert (Path(nemo_rl_reshard.__file__).parent / "integrations/nemo_rl/worker_classes.py").exists()


def test_one_cluster_alone_is_refused():
    with pytest.raises(ConfigError, match="expected the training and the inference cluster"):
        check_seams(FakePolicy([object()]), generation([object()]), (FakeCluster(1),), within_s=1.0)


def test_what_a_worker_cannot_import_comes_with_the_fix():
    folder = str(Path(nemo_rl_reshard.__file__).parents[1])
    for module in ("nemo_rl_reshard", "nemo_rl_reshard.integrations"):
        said = cannot_run(f"RaySystemError: System error: No module named '{module}'\ntraceback: many lines")
        assert f"cannot import this package (No module named '{module}'): put {folder} on PYTHONPATH" in said
        assert "\n" not in said
    assert cannot_run("No module named 'numpy'") == "its environment lacks numpy: install it there"
    assert cannot_run("its actor is gone") == "its actor is gone"


def test_a_worker_describes_itself_in_plain_values():
    config = SimpleNamespace(architectures=["Qwen3ForCausalLM"])
    found = describe(SimpleNamespace(rank=3, model=SimpleNamespace(config=config)))
    assert found == {
        "rank": 3,
        "kind": "SimpleNamespace",
        "architecture": "Qwen3ForCausalLM",
        "package": nemo_rl_reshard.__version__,
    }
    assert describe(SimpleNamespace()) == {**found, "rank": -1, "architecture": None}
