"""Streams: an event clock over stages that run a few at a time, each alone on its trainers, all on the same engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One stage: seconds in which it moves nothing (`idle_s`), and that it needs of links when nobody else does.

    `sent_s` is its trainers' NICs, which no other job uses; `received_s` and `fast_s` are the engines', which all
    share.
    """

    idle_s: float
    sent_s: float
    received_s: float
    fast_s: float

    @property
    def moving_s(self) -> float:
        """Seconds of its slowest link."""
        return max(self.sent_s, self.received_s, self.fast_s)

    @property
    def alone_s(self) -> float:
        """Seconds when no other job runs: calls follow one another, each idle first and moving then."""
        return self.idle_s + self.moving_s


@dataclass(frozen=True, slots=True)
class Interval:
    """Between two events the jobs `running` (by number) progress; `done` is the part of each that gets done."""

    start_s: float
    stop_s: float
    running: tuple[int, ...]
    done: tuple[float, ...]
    saturated: str
    """The shared link that never rests, "network" or "fast", or nothing."""


def run(jobs: Sequence[Job], num_streams: int) -> list[Interval]:
    """Job i runs on stream i modulo `num_streams`, after the stream's earlier ones.

    A job has many calls, so those that run together mix evenly: each goes at the pace it has alone, until a link that
    they share would be asked for more than it has. Then all slow down by the same factor.
    """
    queues = [
        [i for i in range(stream, len(jobs), num_streams) if jobs[i].alone_s > 0] for stream in range(num_streams)
    ]
    left = {i: 1.0 for queue in queues for i in queue}
    now = 0.0
    intervals = []
    while any(queues):
        running = tuple(sorted(queue[0] for queue in queues if queue))
        wanted = {
            "network": sum(jobs[i].received_s / jobs[i].alone_s for i in running),
            "fast": sum(jobs[i].fast_s / jobs[i].alone_s for i in running),
        }
        link = max(wanted, key=lambda name: wanted[name])
        pace = min(1.0, 1.0 / wanted[link]) if wanted[link] > 0 else 1.0
        ends = {i: left[i] * jobs[i].alone_s / pace for i in running}
        step = min(ends.values())
        done = tuple(left[i] if ends[i] <= step else step * pace / jobs[i].alone_s for i in running)
        intervals.append(Interval(now, now + step, running, done, link if pace < 1.0 else ""))
        for i, part in zip(running, done, strict=True):
            left[i] -= part
        queues = [queue[1:] if queue and ends[queue[0]] <= step else queue for queue in queues]
        now += step
    return intervals
