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

    `forwards` when the bytes were received in this refit: they are read from the target, once all receives up to
    order `after` are complete. Messages of equal `content` carry the same bytes, as replicas in different domains do.
    """

    message: Message
    forwards: bool
    after: int
    content: int


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
        contents: dict[tuple[tuple[Part, ...], bool], int] = {}
        for message in program.messages:
            if message.src != program.rank:
                continue
            holds = all(_inside(part.region, held.get(part.tensor, ())) for part in message.parts)
            after = NOTHING if holds else _last_needed(message, landing, program.rank)
            content = contents.setdefault((message.parts, holds), len(contents))
            outgoing.append(Outgoing(message, not holds, after, content))
            if not holds or message.dst == program.rank:
                uses.update(part.tensor for part in message.parts)
        return cls(incoming, tuple(outgoing), uses)


def _inside(region: Region, regions: Iterable[Region]) -> bool:
    return any(holder.contains(region) for holder in regions)


def _last_needed(message: Message, landing: Mapping[str, Sequence[tuple[Region, int]]], rank: int) -> int:
    """Order of the last receive that brings a part of `message`, which forwards."""
    last = NOTHING
    for part in message.parts:
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
