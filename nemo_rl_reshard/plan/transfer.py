"""Transfer, Message and RankProgram: what moves, in which order, seen from the whole and from one rank."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.topology import Link


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One region of one tensor from one rank to one rank.

    `src` held the region at the start or received it in an earlier step.
    """

    tensor: str
    region: Region
    src: int
    dst: int
    link: Link
    step: int


@dataclass(frozen=True, slots=True)
class Part:
    """A region of a tensor inside a message."""

    tensor: str
    region: Region
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """Parts that travel together from `src` to `dst`, packed one after the other in the wire dtype.

    `order` is the message's place in the whole plan. Every rank starts its messages in ascending order, which is why
    bounded windows cannot deadlock. `src == dst` is a local copy.
    """

    order: int
    step: int
    src: int
    dst: int
    link: Link
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A tensor that every target rank gets whole, for its engine's loader, with the reason."""

    tensor: str
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankProgram:
    """One rank's part of a plan: its messages in plan order. `digest` is the whole plan's.

    `leftovers` are the tensors that travel whole among them, in model order.
    """

    rank: int
    digest: str
    messages: tuple[Message, ...]
    leftovers: tuple[TensorSpec, ...]
    message_bytes: int
