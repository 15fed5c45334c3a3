"""Proof, by counting, that a template's moves meet every need once; what fails it is looked at element by element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.plan.plan import Crew, Move, Template
from nemo_rl_reshard.topology import Link

_MOST_PIECES = 2048  # of a template whose pieces are all compared with each other


class Views:
    """What crews hold and need, role by role. Crews with equal views need one proof."""

    def __init__(self, domain_of: Mapping[int, int] | None) -> None:
        self.domain_of = domain_of
        self._numbers: dict[tuple[Region, ...], int] = {}
        self._of_layout: dict[int, dict[int, int]] = {}

    def of(self, crew: Crew, given: TensorLayout, wanted: TensorLayout) -> object:
        """Regions held and needed and the domain of every role; and who is in a layout and not in the crew."""
        held, needed = self._by_rank(given), self._by_rank(wanted)
        labels: dict[int, int] = {}
        domain_of = self.domain_of
        return (
            tuple([held.get(rank) for rank in crew]),
            tuple([needed.get(rank) for rank in crew]),
            None if domain_of is None else tuple([labels.setdefault(domain_of[rank], len(labels)) for rank in crew]),
            tuple(sorted({*held, *needed}.difference(crew))),
            len(set(crew)),
        )

    def _by_rank(self, layout: TensorLayout) -> dict[int, int]:
        found = self._of_layout.get(id(layout))
        if found is None:
            numbers = self._numbers
            found = {rank: numbers.setdefault(regions, len(numbers)) for rank, regions in layout.held}
            self._of_layout[id(layout)] = found
        return found


class Counting:
    """Counts for one template: quick, and silent about what is wrong."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._numel = [piece.numel for piece in template.pieces]
        self._apart = _all_apart(template.pieces)
        self._inside: dict[tuple[int, tuple[Region, ...]], bool] = {}

    def proves(
        self,
        moves: Sequence[Move],
        crew: Crew,
        given: TensorLayout,
        wanted: TensorLayout,
        domain_of: Mapping[int, int] | None,
    ) -> bool:
        """Whether every need is met once, by a rank that has it by then, over the link that joins the two.

        Pieces are disjoint. So if each arrives at a rank at most once and inside what the rank needs, and all that
        arrive are as many elements as it needs, then every needed element arrives exactly once. False means: not
        proven this way.
        """
        held, needed = dict(given.held), dict(wanted.held)
        if not self._apart or len(set(crew)) != len(crew) or not needed.keys() <= set(crew):
            return False
        arrived: dict[tuple[int, int], int] = {}  # role, piece -> lag
        count: dict[int, int] = {}
        for piece, _, dst, _, lag in moves:
            if (dst, piece) in arrived or not self._is_inside(piece, needed.get(crew[dst], ())):
                return False
            arrived[dst, piece] = lag
            count[crew[dst]] = count.get(crew[dst], 0) + self._numel[piece]
        for piece, src, dst, link, lag in moves:
            if src == dst:
                expected = Link.LOCAL
            elif domain_of is None:
                expected = Link.FAST if link is Link.FAST else Link.NETWORK
            else:
                expected = Link.FAST if domain_of[crew[src]] == domain_of[crew[dst]] else Link.NETWORK
            if link is not expected:
                return False
            if not self._is_inside(piece, held.get(crew[src], ())) and arrived.get((src, piece), lag) >= lag:
                return False
        return count == {rank: sum(region.numel for region in regions) for rank, regions in wanted.held}

    def _is_inside(self, piece: int, regions: tuple[Region, ...]) -> bool:
        """Whether one of `regions` contains the piece."""
        key = (piece, regions)
        found = self._inside.get(key)
        if found is None:
            region = self._template.pieces[piece]
            found = self._inside[key] = any(part.contains(region) for part in regions)
        return found


def _all_apart(pieces: Sequence[Region]) -> bool:
    """Whether no two pieces share an element; False also for more than are worth comparing."""
    if not 0 < len(pieces) <= _MOST_PIECES:
        return not pieces
    start = np.array([piece.offset for piece in pieces], dtype=np.int64).reshape(len(pieces), -1)
    stop = np.array([piece.stop for piece in pieces], dtype=np.int64).reshape(len(pieces), -1)
    shared = np.ones((len(pieces), len(pieces)), dtype=bool)
    for dim in range(start.shape[1]):
        shared &= np.maximum.outer(start[:, dim], start[:, dim]) < np.minimum.outer(stop[:, dim], stop[:, dim])
    return int(shared.sum()) == len(pieces)
