"""ChildWatch names the child that died first, with its exit code even when its executor collected the status. B61."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

import pytest

from nemo_rl_reshard.orchestration.child_watch import ChildWatch

NOTICED_WITHIN_S = 20.0


@pytest.fixture
def children() -> Iterator[list[BaseProcess]]:
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2)]
    for child in started:
        child.start()
    yield started
    for child in started:
        child.kill()
        child.join(timeout=10)


def test_b61_the_child_that_died_first_is_named_with_its_signal(children: list[BaseProcess]):
    watch = ChildWatch()
    assert watch.first_deaths(within_s=0.0) == {}
    first = children[1].pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert watch.first_deaths(NOTICED_WITHIN_S) == {first: -signal.SIGKILL}
    children[0].kill()
    children[0].join(timeout=10)
    assert watch.first_deaths(within_s=0.1) == {first: -signal.SIGKILL}, "the executor stops the others afterwards"


def test_b61_the_exit_code_is_awaited_where_another_thread_collected_it(children: list[BaseProcess], monkeypatch):
    """Two threads ask for one child's status: the system tells the second that there is no such child."""
    popen = children[0]._popen  # type: ignore[attr-defined]
    really, late = popen.poll, [None] * 3

    def poll(flag: int = os.WNOHANG) -> int | None:
        code = really(flag)
        return late.pop() if code is not None and late else code

    monkeypatch.setattr(popen, "poll", poll)
    watch = ChildWatch()
    children[0].kill()
    assert watch.first_deaths(NOTICED_WITHIN_S) == {children[0].pid: -signal.SIGKILL}
    assert not late
