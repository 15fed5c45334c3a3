"""Simulation: how long one refit takes, which part of it goes where, and what the links do meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_reshard.simulate.timeline import Timeline

PHASES = ("pack", "network", "fast", "leftover", "install", "overhead")
"""What a second of a refit is spent on, when nothing else hides it.

`overhead` is time in which no byte need move: calls that start, tensors that are prepared one by one, fixed costs.
"""


@dataclass(frozen=True)
class Simulation:
    """`phases` has every name of PHASES and sums to `seconds`. `bottleneck` names what the longest part waits for."""

    seconds: float
    phases: Mapping[str, float]
    bottleneck: str
    timeline: Timeline
