"""Pace: the order in which tensors start, so that every trainer sends from the start of the refit to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence


def paced(names: Sequence[str], holders: Mapping[str, int], nbytes: Mapping[str, int]) -> list[str]:
    """`names`, given in model order, by how far their holders are through what they hold.

    `holders` gives tensors that the same trainers hold the same number. Each such group keeps model order and goes at
    its own even pace: pipeline stages send side by side instead of one after the other, all of them begin at the start
    and end at the end, and an engine that must close layers has about one open per stage. Groups that start alike go
    in model order.
    """
    total: Counter[int] = Counter()
    for name in names:
        total[holders[name]] += nbytes[name]
    passed: Counter[int] = Counter()
    progress: list[tuple[float, int]] = []
    for index, name in enumerate(names):
        group = holders[name]
        # Exact integers go in, so every machine rounds the quotient alike.
        progress.append((passed[group] / total[group] if total[group] else 0.0, index))
        passed[group] += nbytes[name]
    return [names[index] for _, index in sorted(progress)]
