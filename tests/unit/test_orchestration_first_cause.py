"""B61 B62: one error for a failed stage that tells first causes from ranks that only waited."""

import copy
import json
import pickle

import pytest

from nemo_rl_reshard.errors import (
    RefitAbortedError,
    RefitError,
    ReshardError,
    TargetError,
    TransportError,
    TransportTimeoutError,
)
from nemo_rl_reshard.orchestration.first_cause import refit_error
from nemo_rl_reshard.orchestration.outcome import DIED, SILENT, Fault, Outcome

NAMES = {rank: f"rank {rank}" for rank in range(5)}

TIMED_OUT = Fault.of(TransportTimeoutError("waited"))
CALLED_OFF = Fault.of(RefitAbortedError("called off"))
BROKEN = Fault.of(TransportError("connection closed by peer"))
RAISED = Fault.of(TargetError("tensor 2 of 3"))
DEAD = Fault(DIED, "its actor is gone")
MUTE = Fault(SILENT, "gave no answer")


@pytest.mark.parametrize(
    ("faults", "causes"),
    [
        pytest.param([None, TIMED_OUT, RAISED, CALLED_OFF, BROKEN], {2}, id="B62-a-raise-among-waiting-ranks"),
        pytest.param([BROKEN, TIMED_OUT, BROKEN, DEAD, CALLED_OFF], {3}, id="B61-a-death-breaks-its-peers"),
        pytest.param([RAISED, TIMED_OUT, RAISED, CALLED_OFF, None], {0, 2}, id="two-ranks-raise"),
        pytest.param([TIMED_OUT, TIMED_OUT, MUTE, TIMED_OUT, CALLED_OFF], {2}, id="a-stalled-rank-never-answers"),
        pytest.param([BROKEN, CALLED_OFF, None, TIMED_OUT, MUTE], {0}, id="a-broken-link-explains-a-mute-rank"),
        pytest.param([DEAD, RAISED, MUTE, BROKEN, TIMED_OUT], {0, 1}, id="dead-and-raising-both-count"),
        pytest.param([TIMED_OUT, TIMED_OUT, TIMED_OUT, TIMED_OUT, TIMED_OUT], set(), id="nobody-says-why"),
    ],
)
def test_first_causes(faults, causes):
    outcomes = [Outcome(rank, None, fault) for rank, fault in enumerate(faults)]
    error = refit_error("refit", outcomes, NAMES)
    assert set(error.causes) == {NAMES[rank] for rank in causes}
    failed = {NAMES[rank] for rank, fault in enumerate(faults) if fault is not None}
    assert set(error.waiting) == failed - set(error.causes)
    assert f"failed on {len(failed)} of 5 ranks" in str(error)
    for name in failed:
        assert name in str(error)


def test_a_rank_that_was_busy_when_the_others_gave_up_is_the_cause():
    """It woke up after the deadline and heard that it had been called off: by its clock, long after the others."""
    outcomes = [
        Outcome(0, None, TIMED_OUT, seconds=5.0),
        Outcome(1, None, CALLED_OFF, seconds=5.1),
        Outcome(3, None, CALLED_OFF, seconds=7.5),
    ]
    assert set(refit_error("refit", outcomes, NAMES).causes) == {"rank 3"}


def test_b71_an_outcome_is_plain_json_and_needs_no_exception_class_to_be_read():
    class OnlyHereError(TargetError):
        """Unknown wherever the outcome is read."""

    def write_in_place() -> None:
        raise OnlyHereError("packed layout")

    with pytest.raises(OnlyHereError) as raised:
        write_in_place()
    written = Outcome(4, None, Fault.of(raised.value))
    text = json.dumps(written.to_plain())
    assert Outcome.from_plain(json.loads(text)) == written
    assert "OnlyHereError: packed layout [" in str(written.fault)
    value = Outcome(1, {"digest": "ab", "parts": [1, 2]}, seconds=0.5, written=True)
    assert Outcome.from_plain(json.loads(json.dumps(value.to_plain()))) == value


def test_b62_the_error_is_what_nemo_rl_catches_and_survives_the_way_out_of_an_actor():
    error = refit_error("refit", [Outcome(0, None, RAISED), Outcome(1, None, CALLED_OFF)], NAMES)
    assert isinstance(error, RuntimeError)
    assert isinstance(error, ReshardError)
    assert not error.before_first_write, "what nobody has proven counts as written"
    error.before_first_write = True
    error.add_note("step 3")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is RefitError
        assert (str(again), again.causes, again.waiting) == (str(error), error.causes, error.waiting)
        assert (again.before_first_write, again.__notes__) == (True, ["step 3"])
