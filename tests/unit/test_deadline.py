"""Deadline: one moment, never later than asked, and an error that says what took too long."""

import time

import pytest

from nemo_rl_reshard.errors import TransportTimeoutError
from nemo_rl_reshard.transport.deadline import Deadline


def test_it_counts_down_and_then_raises_with_what_took_too_long():
    deadline = Deadline.after(60)
    deadline.check("this")
    assert 59 < deadline.remaining_s() <= 60
    passed = Deadline(at_s=time.monotonic() - 1, budget_s=2.5)
    assert passed.remaining_s() == 0
    with pytest.raises(TransportTimeoutError, match=r"^reading passed its deadline of 2\.5 s$"):
        passed.check("reading")


def test_time_for_torch_is_never_zero_since_that_means_for_ever_there():
    assert Deadline(at_s=0, budget_s=1).remaining().total_seconds() == 0.001
    assert 59 < Deadline.after(60).remaining().total_seconds() <= 60


@pytest.mark.parametrize("seconds", [0, -1, 1e18, float("inf"), float("nan")])
def test_a_deadline_that_never_comes_or_has_passed_is_refused(seconds):
    with pytest.raises(ValueError, match="positive, finite"):
        Deadline.after(seconds)
