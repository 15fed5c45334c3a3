"""Stages on streams: what shares a link slows down together, what does not share runs at its own pace."""

import pytest

from nemo_rl_reshard.simulate.streams import Job, run


def end_s(jobs, num_streams=2):
    intervals = run(jobs, num_streams)
    return intervals[-1].stop_s if intervals else 0.0


def test_one_stage_is_idle_then_waits_for_its_slowest_link():
    assert end_s([Job(idle_s=1, sent_s=2, received_s=3, fast_s=0.5)]) == pytest.approx(1 + 3)


def test_stages_of_one_stream_follow_one_another():
    jobs = [Job(1, 2, 0, 0), Job(0, 3, 0, 0)]
    assert end_s(jobs, num_streams=1) == pytest.approx(6)


def test_two_streams_send_side_by_side_from_their_own_trainers():
    jobs = [Job(0, 4, 1, 0)] * 4
    assert end_s(jobs) == pytest.approx(8)


def test_engines_nics_are_shared_so_two_stages_are_no_faster_than_one():
    jobs = [Job(0, 1, 4, 0)] * 2
    assert end_s(jobs) == pytest.approx(8)


def test_idle_time_of_one_stage_hides_behind_the_bytes_of_the_other():
    # Alone 5 s each, 3 s of them on the engines' NICs: together they ask for 6 s in 5.
    assert end_s([Job(2, 1, 3, 0)] * 2) == pytest.approx(6)
    # 2 s of 5 each: they ask for 4 s in 5, so nobody slows down.
    assert end_s([Job(3, 1, 2, 0)] * 2) == pytest.approx(5)


def test_the_longer_stage_speeds_up_when_the_other_is_done():
    # Both want the whole link: half speed until the short one is done at 4, then 2 of 6 s are done.
    intervals = run([Job(0, 0, 2, 0), Job(0, 0, 6, 0)], 2)
    assert [interval.stop_s for interval in intervals] == pytest.approx([4, 8])
    assert intervals[0].saturated == "network"
    assert intervals[1].saturated == ""


def test_fast_links_are_shared_too():
    intervals = run([Job(1, 0, 1, 3)] * 2, 2)
    assert intervals[-1].stop_s == pytest.approx(6)
    assert intervals[0].saturated == "fast"


def test_a_stage_without_work_takes_no_turn():
    assert end_s([Job(0, 0, 0, 0), Job(0, 1, 0, 0), Job(0, 0, 0, 0)]) == pytest.approx(1)
    assert end_s([]) == 0


def test_all_of_every_stage_gets_done():
    jobs = [Job(0.1 * i, 1, 0.5 + 0.2 * i, 0.3) for i in range(7)]
    done = dict.fromkeys(range(7), 0.0)
    for interval in run(jobs, 2):
        for i, part in zip(interval.running, interval.done, strict=True):
            done[i] += part
    assert list(done.values()) == pytest.approx([1.0] * 7)
