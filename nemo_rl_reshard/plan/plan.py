"""Plan: the whole model's moves, factored so that tensors of one kind share one template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.transfer import Leftover, Transfer
from nemo_rl_reshard.topology import Link

_LARGEST_ITEM = 8
_LARGEST_BUCKET = 1 << 40
"""Steps count bytes in 64-bit integers; a bucket of more would let them wrap."""


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """`bucket_bytes` bounds what one rank receives in one step, `message_bytes` one message. Raises PlanError."""

    bucket_bytes: int = 64 << 20
    message_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        for name, value in (("bucket_bytes", self.bucket_bytes), ("message_bytes", self.message_bytes)):
            if value < _LARGEST_ITEM:
                raise PlanError(f"{name} is {value}; it must be at least {_LARGEST_ITEM}, the largest element")
            if value > _LARGEST_BUCKET:
                raise PlanError(f"{name} is {value}; it must be at most {_LARGEST_BUCKET}")

    @property
    def largest_message(self) -> int:
        """Bytes that no message passes."""
        return min(self.bucket_bytes, self.message_bytes)


class Move(NamedTuple):
    """One transfer of a template: `piece` indexes the template's pieces, `lag` counts steps from the tensor's own.

    `src` and `dst` are roles; a crew says which rank plays which.
    """

    piece: int
    src: int
    dst: int
    link: Link
    lag: int


def columns_of(moves: Sequence[Move]) -> tuple[NDArray[np.int64], ...]:
    """Piece, src, dst and lag of all `moves`, an array each."""
    count = len(moves)
    return tuple(np.fromiter(map(itemgetter(field), moves), np.int64, count) for field in (0, 1, 2, 4))


@dataclass(frozen=True, slots=True)
class Template:
    """What all tensors of one shape, item size and pair of layouts share, whichever ranks play the roles.

    `pieces` are distinct regions. Each of `variants` moves all that is needed; variants differ in which replica sends,
    which receives first and forwards, and in lags.
    """

    shape: tuple[int, ...]
    item_size: int
    pieces: tuple[Region, ...]
    variants: tuple[tuple[Move, ...], ...]

    def nbytes_of(self, piece: int) -> int:
        """Bytes of one piece."""
        return self.pieces[piece].numel * self.item_size


Crew = tuple[int, ...]
"""Role -> rank: the trainers that hold a tensor, ascending, then the other ranks that need it, ascending."""


class Placed(NamedTuple):
    """One tensor: which variant of which template moves it, played by which crew, starting in which step."""

    tensor: str
    template: int
    variant: int
    crew: int
    step: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole refit. `placed` is in order of steps, `leftovers` in model order. `digest` seals everything else.

    A leftover that is placed travels whole to every target rank; one that is not is gathered and broadcast afterwards.

    `specs` holds every tensor that moves: the target's shape and its dtype, which is what travels. `sources` and
    `targets` are the ranks of each side, `skipped` maps tensors that do not travel to the reason.
    """

    options: PlanOptions
    specs: Mapping[str, TensorSpec]
    templates: tuple[Template, ...]
    crews: tuple[Crew, ...]
    placed: tuple[Placed, ...]
    leftovers: tuple[Leftover, ...]
    skipped: Mapping[str, str]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    digest: str = ""

    def transfers(self) -> Iterator[Transfer]:
        """Every transfer, made on demand, tensor by tensor."""
        for tensor, template_index, variant, crew_index, step in self.placed:
            template, crew = self.templates[template_index], self.crews[crew_index]
            pieces = template.pieces
            for piece, src, dst, link, lag in template.variants[variant]:
                yield Transfer(tensor, pieces[piece], crew[src], crew[dst], link, step + lag)

    @property
    def broadcast(self) -> tuple[Leftover, ...]:
        """The leftovers that are gathered and broadcast."""
        placed = {row.tensor for row in self.placed}
        return tuple(leftover for leftover in self.leftovers if leftover.tensor not in placed)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both sides, ascending."""
        return tuple(sorted({*self.sources, *self.targets}))

    @property
    def num_steps(self) -> int:
        """Steps from 0 to the last transfer's."""
        last = {
            (index, variant): max((move.lag for move in moves), default=0)
            for index, template in enumerate(self.templates)
            for variant, moves in enumerate(template.variants)
        }
        return max((row.step + last[row.template, row.variant] + 1 for row in self.placed), default=0)
