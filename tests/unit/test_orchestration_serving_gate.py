"""B63 B64 B65: an engine generates only what a full refit has published, and is refitted only when idle and awake."""

import pytest

from nemo_rl_reshard.errors import StateError, TargetError
from nemo_rl_reshard.orchestration.serving_gate import ServingGate


@pytest.fixture
def gate() -> ServingGate:
    return ServingGate("engine 0")


def published(gate: ServingGate, version: int) -> ServingGate:
    gate.begin_refit(num_unfinished=0)
    gate.finish_refit(version)
    gate.publish(version)
    return gate


def test_a_new_engine_refuses_to_generate(gate):
    with pytest.raises(StateError, match=r"engine 0 has no usable weights \(no refit has succeeded since it started"):
        gate.check_may_generate()


def test_two_refits_publish_two_versions(gate):
    assert published(gate, 1).check_may_generate() == 1
    assert published(gate, 2).check_may_generate() == 2


def test_b63_between_begin_and_publish_nothing_is_generated(gate):
    published(gate, 1).begin_refit(num_unfinished=0)
    assert gate.version is None
    with pytest.raises(StateError, match="its last refit did not finish"):
        gate.check_may_generate()
    assert published(gate, 2).check_may_generate() == 2


def test_b65_an_engine_with_requests_is_not_refitted_and_keeps_its_version(gate):
    published(gate, 1)
    with pytest.raises(TargetError, match="3 unfinished requests"):
        gate.begin_refit(num_unfinished=3)
    assert gate.check_may_generate() == 1


def test_b63_a_sleeping_engine_is_not_refitted(gate):
    published(gate, 1).fall_asleep(weights_lost=False)
    with pytest.raises(TargetError, match="asleep"):
        gate.begin_refit(num_unfinished=0)
    with pytest.raises(StateError, match="asleep"):
        gate.check_may_generate()
    gate.wake()
    assert gate.check_may_generate() == 1


def test_b64_sleep_that_throws_weights_away_needs_a_full_refit(gate):
    published(gate, 1).fall_asleep(weights_lost=True)
    gate.wake()
    with pytest.raises(StateError, match="sleep threw its weights away"):
        gate.check_may_generate()
    assert published(gate, 2).check_may_generate() == 2


def test_a_refit_that_failed_elsewhere_is_taken_back(gate):
    published(gate, 1).retract("engine 1 failed")
    with pytest.raises(StateError, match="engine 1 failed"):
        gate.check_may_generate()


def test_b63_a_version_is_not_published_over_weights_that_are_not_its_own(gate):
    """A restarted actor, an order of another version, sleep or a retreat between the refit and its publication."""
    with pytest.raises(StateError, match="does not hold version 1"):
        gate.publish(1)
    gate.begin_refit(num_unfinished=0)
    gate.finish_refit(1)
    with pytest.raises(StateError, match="does not hold version 2"):
        gate.publish(2)
    gate.fall_asleep(weights_lost=True)
    gate.wake()
    with pytest.raises(StateError, match=r"does not hold version 1 \(sleep threw its weights away"):
        gate.publish(1)
    gate.begin_refit(num_unfinished=0)
    gate.finish_refit(2)
    gate.retract("engine 1 failed")
    with pytest.raises(StateError, match="engine 1 failed"):
        gate.publish(2)
    with pytest.raises(StateError, match="engine 1 failed"):
        gate.check_may_generate()
    assert published(gate, 3).check_may_generate() == 3


def test_a_broken_engine_stays_broken(gate):
    published(gate, 1).break_down("worker 1 died")
    for call in (gate.check_may_generate, lambda: gate.begin_refit(num_unfinished=0), lambda: gate.publish(2)):
        with pytest.raises(StateError, match=r"engine 0 is broken \(worker 1 died\): replace it"):
            call()
