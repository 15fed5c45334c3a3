"""A program made ready to run: which messages wait for which, and what is left to do for each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.plan.transfer import Message, Part, RankProgram

NOTHING = -1
"""As an order: waits for no message."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that this rank starts: a send, or a local copy.

    `forwards` says of each part whether its bytes were received in this refit: these are read from the target, once all
    receives up to order `after` are complete. A colocated rank may send them beside parts that its source holds.
    Messages of equal `content` carry the same bytes, as replicas in different domains do.
    """

    message: Message
    forwards: tuple[bool, ...]
    after: int
    content: int

    @property
    def forwarded(self) -> tuple[Part, ...]:
        """The parts that are forwarded."""
        return tuple(part for part, forwards in zip(self.message.parts, self.forwards, strict=True) if forwards)


@dataclass(frozen=True, slots=True)
class Steps:
    """One rank's messages in plan order, receives apart from the rest, as a program that is run many times.

    `uses` counts, for each tensor of the target, the writes and forwards after which it is done.
    """

    incoming: tuple[Message, ...]
    outgoing: tuple[Outgoing, ...]
    uses: Mapping[str, int]

    @classmethod
    def of(cls, program: RankProgram, held: Mapping[str, Sequence[Region]]) -> Steps:
        """Prepare `program` for a rank whose source holds the regions `held`.

        Raises PlanError for messages out of order, or one that sends what the rank neither holds nor received before.
        """
        orders = [message.order for message in program.messages]
        if any(after <= before for before, after in pairwise(orders)):
            raise PlanError(f"rank {program.rank}: its messages are not in ascending order")
        incoming = tuple(message for message in program.messages if message.dst == program.rank != message.src)
        landing: dict[str, list[tuple[Region, int]]] = {}
        uses: Counter[str] = Counter()
        for message in incoming:
            for part in message.parts:
                landing.setdefault(part.tensor, []).append((part.region, message.order))
                uses[part.tensor] += 1
        outgoing = []
        contents: dict[tuple[tuple[Part, ...], tuple[bool, ...]], int] = {}
        for message in program.messages:
            if message.src != program.rank:
                continue
            forwards = tuple(not _inside(part.region, held.get(part.tensor, ())) for part in message.parts)
            content = contents.setdefault((message.parts, forwards), len(contents))
            step = Outgoing(message, forwards, _last_needed(message, forwards, landing, program.rank), content)
            outgoing.append(step)
            used = message.parts if message.dst == program.rank else step.forwarded
            uses.update(part.tensor for part in used)
        return cls(incoming, tuple(outgoing), uses)


def _inside(region: Region, regions: Iterable[Region]) -> bool:
    return any(holder.contains(region) for holder in regions)


def _last_needed(
    message: Message, forwards: Sequence[bool], landing: Mapping[str, Sequence[tuple[Region, int]]], rank: int
) -> int:
    """Order of the last receive that brings a part that `message` forwards."""
    last = NOTHING
    for part, forwarded in zip(message.parts, forwards, strict=True):
        if not forwarded:
            continue
        arrived = 0
        for region, order in landing.get(part.tensor, ()):
            common = part.region.intersect(region)
            if common is not None and order < message.order:
                arrived += common.numel
                last = max(last, order)
        if arrived != part.region.numel:
            raise PlanError(
                f"{part.tensor}: rank {rank} is to send region {part.region.offset}+{part.region.extent} to rank "
                f"{message.dst} in message {message.order}, and neither holds nor received it before"
            )
    return last
