"""Pace: the order in which tensors start, so that every step asks for a bit of everything from everybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio
_FULL = 1 << 64


def paced(names: Sequence[str], series: Mapping[str, Hashable]) -> list[str]:
    """`names`, given in model order, so that each series is spread evenly over the whole.

    A series is what one crew moves in one way: equal tensors of one trainer, or of one pipeline stage. Member i of n
    starts after the share (i + phase) / n of the whole. So all trainers send from the start to the end, whatever they
    hold; each series, and with it each stage, keeps model order; and about one layer per stage is open at a time.
    Phases are multiples of the golden ratio, which keep any number of series apart: without them all stages would come
    to their attention, or to their experts, at the same moment.
    """
    length = Counter(series[name] for name in names)
    phase: dict[Hashable, int] = {}
    passed: Counter[Hashable] = Counter()
    keys: list[tuple[float, int]] = []
    for index, name in enumerate(names):
        each = series[name]
        start = phase.setdefault(each, len(phase) * _GOLDEN % _FULL)
        # Exact integers go in, so every machine rounds the quotient alike.
        keys.append(((passed[each] * _FULL + start) / (length[each] * _FULL), index))
        passed[each] += 1
    return [names[index] for _, index in sorted(keys)]
