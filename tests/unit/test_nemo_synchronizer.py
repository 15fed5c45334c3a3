"""The synchronizer without a cluster: what it carries into another process, and when NeMo RL may take over."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from nemo_rl_reshard.errors import ConfigError, DeclarationError, PlanError, RefitError, StateError
from nemo_rl_reshard.integrations.nemo_rl.fallback import LoopRefit, ReplacedSynchronizer
from nemo_rl_reshard.integrations.nemo_rl.members import EngineMember, PolicyMember
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlSection
from nemo_rl_reshard.integrations.nemo_rl.synchronizer import ReshardWeightSynchronizer
from nemo_rl_reshard.params.manifest import Side


def made(own_refit=None, **section):
    trainers = [PolicyMember("policy worker 0", Side.TRAINER, 1, "a handle")]
    engines = [EngineMember("engine 0", Side.INFERENCE, 2, "another")]
    return ReshardWeightSynchronizer(trainers, engines, NemoRlSection(**section), own_refit=own_refit)


def test_a_copy_carries_members_and_section_and_no_world_of_its_own():
    original = made(LoopRefit("policy", "generation"), on_failure="fall_back")
    original._controller = SimpleNamespace(epoch=41)
    original._failure = RefitError("m", {}, {})
    copy = pickle.loads(pickle.dumps(original))
    assert (copy._trainers, copy._engines, copy._section) == (original._trainers, original._engines, original._section)
    assert (copy._epoch, copy._controller, copy._failure) == (41, None, None)
    assert copy.is_stale
    assert copy._own_refit is None, "a copy of the policy would shut the trainers down when it is collected"
    copy.shutdown()
    copy.shutdown()


def test_the_synchronizer_that_was_replaced_travels_along():
    copy = pickle.loads(pickle.dumps(made(ReplacedSynchronizer("the original"), on_failure="fall_back")))
    assert copy._own_refit.original == "the original"


UNWRITTEN, WRITTEN = RefitError("m", {}, {}, True), RefitError("m", {}, {}, False)
DECISIONS = {
    "nothing was written": (UNWRITTEN, "fall_back", True),
    "it was not asked for": (UNWRITTEN, "raise", False),
    "something was written": (WRITTEN, "fall_back", False),
    "the sides do not fit": (DeclarationError("m"), "fall_back", True),
    "there is no plan": (PlanError("m"), "fall_back", True),
    "hosts cannot be reached": (ConfigError("m"), "fall_back", True),
    "it was shut down": (StateError("m"), "fall_back", False),
    "nobody knows what happened": (ValueError("m"), "fall_back", False),
}


@pytest.mark.parametrize(("error", "on_failure", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_nemo_rl_takes_over_only_before_a_write_and_if_asked_to(error, on_failure, expected):
    assert made(LoopRefit("policy", "generation"), on_failure=on_failure).may_fall_back(error) is expected


def test_nemo_rl_does_not_take_over_engines_that_a_former_failure_left_mixed_or_that_are_lost():
    def fail(version):
        raise WRITTEN

    synchronizer = made(LoopRefit("policy", "generation"), on_failure="fall_back")
    synchronizer._in_flight = True
    synchronizer._controller = SimpleNamespace(lost=frozenset(), plan=lambda: None, refit=fail)
    assert synchronizer.may_fall_back(UNWRITTEN)
    with pytest.raises(RefitError):
        synchronizer.sync_weights()
    assert not synchronizer.may_fall_back(UNWRITTEN)
    synchronizer = made(LoopRefit("policy", "generation"), on_failure="fall_back")
    synchronizer._controller = SimpleNamespace(lost=frozenset({"engine 0"}))
    assert not synchronizer.may_fall_back(UNWRITTEN)


def test_the_loops_own_refit_runs_without_our_synchronizer(monkeypatch):
    calls = []
    module = ModuleType("nemo_rl.algorithms.grpo")
    module.refit_policy_generation = lambda *given, **named: calls.append((given, named))
    for name in ("nemo_rl", "nemo_rl.algorithms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    generation = SimpleNamespace(weight_synchronizer="ours")
    assert LoopRefit("policy", generation).take_over("timer") == {}
    assert generation.weight_synchronizer is None
    assert calls == [(("policy", generation, False), {"timer": "timer"})]


def test_a_copy_without_a_way_back_says_so():
    copy = pickle.loads(pickle.dumps(made(LoopRefit("policy", "generation"), on_failure="fall_back")))
    copy.fall_back()
    with pytest.raises(StateError, match="in the process that attached"):
        copy.sync_weights()
    assert copy.is_stale
