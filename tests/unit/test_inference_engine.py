"""What InferenceEngine does around its engine, with a plain class where vLLM's would be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_reshard.errors import HandshakeError, StateError, TargetError
from nemo_rl_reshard.orchestration.inference_actor import InferenceEngine
from nemo_rl_reshard.orchestration.served_ranks import ServedRanks


class Engine:
    """The calls of `vllm.LLM` that matter here, noted in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails_to_sleep = False
        self.resets = True
        self.llm_engine = SimpleNamespace(
            get_num_unfinished_requests=lambda: 0, reset_encoder_cache=lambda: self.calls.append("encoder cache")
        )

    def sleep(self, level: int) -> None:
        if self.fails_to_sleep:
            raise RuntimeError(f"level {level} failed half-way")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("prefix cache")
        return self.resets

    def reset_mm_cache(self) -> None:
        self.calls.append("image cache")

    def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    def collective_rpc(self, method: str, timeout: float, args: tuple[str, list[dict[str, Any]]]) -> list[Any]:
        del method, timeout
        self.calls.append(args[0])
        return [{"rank": argument["rank"], "seconds": 0.0, "written": False, "value": None} for argument in args[1]]


@pytest.fixture
def actor() -> InferenceEngine:
    """As after `__init__` with an engine of two workers."""
    made = InferenceEngine.__new__(InferenceEngine)
    ServedRanks.__init__(made, "engine 0")
    made._llm = Engine()
    made._processes = [{"rank": rank, "pid": 100 + rank} for rank in range(2)]
    made.reshard("declare", ranks(2))
    return made


def ranks(number: int, **more: Any) -> list[dict[str, Any]]:
    return [{"rank": 4 + rank, "epoch": 1, "answer_within_s": 5.0, **more} for rank in range(number)]


def refit(actor: InferenceEngine, version: int) -> None:
    actor.reshard("refit", ranks(2, order={"version": version}))


def test_a_refit_resets_every_cache_of_old_results_and_only_then_can_be_published(actor):
    with pytest.raises(StateError, match="does not hold version 1"):
        actor.reshard("publish", ranks(2, version=1))
    for version in (1, 2):
        actor._llm.calls.clear()
        refit(actor, version)
        assert actor._llm.calls == ["refit", "prefix cache", "image cache", "encoder cache"]
        assert actor.version() is None
        actor.reshard("publish", ranks(2, version=version))
        assert actor.version() == version
        assert actor._llm.calls[-1] == f"version {version}"


def test_a_cache_that_stays_keeps_the_refit_from_being_published(actor):
    actor._llm.resets = False
    with pytest.raises(TargetError, match="keeps its prefix cache"):
        refit(actor, 1)
    with pytest.raises(StateError, match="does not hold version 1"):
        actor.reshard("publish", ranks(2, version=1))


@pytest.mark.parametrize("number", [1, 3])
def test_a_member_of_the_wrong_size_is_refused_before_any_worker_is_asked(actor, number):
    """A worker without an argument would raise, and its engine would have to be replaced."""
    with pytest.raises(HandshakeError, match=f"the engine has 2 workers and is seated as {number} ranks"):
        actor.reshard("declare", ranks(number))
    assert actor._llm.calls == ["declare"]
    refit(actor, 1)
    actor.reshard("publish", ranks(2, version=1))
    assert actor.version() == 1


def test_b64_a_sleep_that_fails_half_way_serves_nothing(actor):
    refit(actor, 1)
    actor.reshard("publish", ranks(2, version=1))
    actor._llm.fails_to_sleep = True
    with pytest.raises(RuntimeError, match="half-way"):
        actor.sleep(2)
    assert actor.version() is None
