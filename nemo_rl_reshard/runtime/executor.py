"""Executor: runs one rank's messages in plan order, many in flight, packing while others are on the wire."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.plan.transfer import Message, Part, RankProgram
from nemo_rl_reshard.runtime.endpoint import Source, Target
from nemo_rl_reshard.runtime.report import Phase, RankReport
from nemo_rl_reshard.runtime.steps import NOTHING, Outgoing, Steps
from nemo_rl_reshard.runtime.verify import Verification
from nemo_rl_reshard.topology import Link
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Pending, Transport
from nemo_rl_reshard.transport.staging import StagingSlots, is_plain, pack, unpack, wire_bytes

UNWRITTEN = 0xFF
"""Fills where bytes will land when a refit is verified: NaN in every float format that travels."""


@dataclass(slots=True)
class _InFlight:
    """A started message, the buffer it travels in, the slot that buffer belongs to, if it is staged, and the parts
    that it forwards."""

    message: Message
    pending: Pending
    buffer: Tensor
    slot: int | None
    forwarded: tuple[Part, ...] = ()


class _Lane:
    """One direction: the messages under way, oldest first, and the slots of those that are staged.

    Slots are allocated when the first message needs one, so a rank whose messages all travel in place has none. Bytes
    that go to several ranks are packed once: a message joins the slot of one under way that carries the same.
    """

    def __init__(self, messages: Sequence[Message], in_flight: int, bucket_bytes: int) -> None:
        self.under_way: deque[_InFlight] = deque()
        self._in_flight = in_flight
        self._slot_bytes = max((message.nbytes for message in messages), default=0)
        # One at least, even if a single message is more than a bucket.
        self._num_slots = max(1, min(in_flight, bucket_bytes // max(1, self._slot_bytes)))
        self._slots: StagingSlots | None = None
        self._packed: dict[int, tuple[int, Tensor]] = {}
        self._sharing: Counter[int] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of staging."""
        return self._slots.nbytes if self._slots is not None else 0

    @property
    def has_room(self) -> bool:
        """Whether another message may start, staged or not."""
        return len(self.under_way) < self._in_flight and (self._slots is None or self._slots.has_free)

    def take(self, nbytes: int, content: int | None = None) -> tuple[int, Tensor]:
        """A slot's number and its first `nbytes` bytes, to be filled with `content`."""
        if self._slots is None:
            self._slots = StagingSlots(self._num_slots, self._slot_bytes)
        slot, buffer = self._slots.take(nbytes)
        self._sharing[slot] = 1
        if content is not None:
            self._packed[content] = (slot, buffer)
        return slot, buffer

    def share(self, content: int) -> tuple[int, Tensor] | None:
        """The slot under way that already holds `content`, for another message; None if there is none."""
        found = self._packed.get(content)
        if found is not None:
            self._sharing[found[0]] += 1
        return found

    def start(self, flight: _InFlight) -> None:
        """Put a started message under way."""
        self.under_way.append(flight)

    def finish_oldest(self) -> None:
        """Forget the oldest message, and free its slot if no other shares it."""
        slot = self.under_way.popleft().slot
        if slot is None:
            return
        self._sharing[slot] -= 1
        if not self._sharing[slot]:
            assert self._slots is not None
            self._slots.give_back(slot)
            self._packed = {content: held for content, held in self._packed.items() if held[0] != slot}


class Executor:
    """One rank's messages, ready to run any number of times.

    Receives are posted as early as the window allows and both windows are emptied in plan order. The smallest message
    that is not complete anywhere is therefore always started at both of its ends, and no window can deadlock.

    At most `in_flight` sends and as many receives are under way. What cannot travel in place is staged: `bucket_bytes`
    at most for sends, and for receives. Views are asked for when they are used and not kept, since a packed target
    allocates per refit and a trainer may move its storage.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        *,
        source: Source | None,
        target: Target | None,
        held: Mapping[str, Sequence[Region]],
        in_flight: int,
        bucket_bytes: int,
    ) -> None:
        self._steps = Steps.of(program, held)
        self._transport = transport
        self._source = source
        self._target = target
        self._sending = _Lane([step.message for step in self._steps.outgoing], in_flight, bucket_bytes)
        self._receiving = _Lane(self._steps.incoming, in_flight, bucket_bytes)
        self._uses_left: Counter[str] = Counter()

    @property
    def extra_bytes(self) -> int:
        """Bytes of staging that were ever used; they stay allocated for the next refit."""
        return self._sending.nbytes + self._receiving.nbytes

    def run(self, deadline: Deadline, report: RankReport, verification: Verification) -> None:
        """Move everything once. Raises what the transport, the source or the target raises."""
        self._uses_left = Counter(self._steps.uses)
        incoming, outgoing = deque(self._steps.incoming), deque(self._steps.outgoing)
        arrived = NOTHING
        while incoming or outgoing or self._receiving.under_way or self._sending.under_way:
            while incoming and self._receiving.has_room:
                self._start_receive(incoming.popleft(), report, verification)
            if outgoing and outgoing[0].after <= arrived and self._sending.has_room:
                self._start_outgoing(outgoing.popleft(), report, verification)
            elif self._receives_first():
                arrived = self._finish_receive(deadline, report, verification)
            else:
                self._finish_send(deadline, report)

    def _receives_first(self) -> bool:
        """Whether the oldest message under way is a receive."""
        receiving, sending = self._receiving.under_way, self._sending.under_way
        if not sending or not receiving:
            return bool(receiving)
        return receiving[0].message.order < sending[0].message.order

    def _start_receive(self, message: Message, report: RankReport, verification: Verification) -> None:
        with report.timing(Phase.PACK):
            buffer, slot = self._landing(message)
            if verification.is_on:
                buffer.fill_(UNWRITTEN)
        pending = self._transport.receive(buffer, message.src)
        report.num_messages += 1
        report.num_zero_copy += slot is None
        report.bytes_received[message.link] += message.nbytes
        self._receiving.start(_InFlight(message, pending, buffer, slot))

    def _landing(self, message: Message) -> tuple[Tensor, int | None]:
        """Where the bytes of `message` arrive: the target itself, or a staging slot."""
        if len(message.parts) == 1:
            view = self._target_view(message.parts[0])
            if is_plain(view, _torch_dtype(message.parts[0])):
                return wire_bytes(view), None
        slot, buffer = self._receiving.take(message.nbytes)
        return buffer, slot

    def _finish_receive(self, deadline: Deadline, report: RankReport, verification: Verification) -> int:
        """Wait for the oldest receive and bring its bytes home; returns its order."""
        flight = self._receiving.under_way[0]
        message = flight.message
        with report.timing(_phase_of(message.link)):
            flight.pending.wait(deadline)
        with report.timing(Phase.PACK):
            if flight.slot is not None:
                start = 0
                for part in message.parts:
                    unpack(flight.buffer[start : start + part.nbytes], self._target_view(part), _torch_dtype(part))
                    start += part.nbytes
            self._receiving.finish_oldest()
        with report.timing(Phase.VERIFY):
            self._note_received(message, verification)
        self._count_down(message.parts, report)
        return message.order

    def _start_outgoing(self, step: Outgoing, report: RankReport, verification: Verification) -> None:
        message = step.message
        views = [self._outgoing_view(*origin) for origin in zip(message.parts, step.forwards, strict=True)]
        with report.timing(Phase.VERIFY):
            for part, view in zip(message.parts, views, strict=True):
                if verification.picks(part.tensor):
                    verification.sent(message, part, view.to(_torch_dtype(part)))
        report.bytes_sent[message.link] += message.nbytes
        if message.dst == message.src:
            report.bytes_received[message.link] += message.nbytes
            with report.timing(Phase.PACK):
                for part, view in zip(message.parts, views, strict=True):
                    self._target_view(part).copy_(view)
            with report.timing(Phase.VERIFY):
                self._note_received(message, verification)
            self._count_down(message.parts, report)
            return
        with report.timing(Phase.PACK):
            buffer, slot = self._leaving(step, views)
        pending = self._transport.send(buffer, message.dst)
        report.num_messages += 1
        report.num_zero_copy += slot is None
        self._sending.start(_InFlight(message, pending, buffer, slot, step.forwarded))

    def _leaving(self, step: Outgoing, views: Sequence[Tensor]) -> tuple[Tensor, int | None]:
        """The bytes of a message: live storage where that is what travels, else packed into a staging slot."""
        message = step.message
        if len(views) == 1 and is_plain(views[0], _torch_dtype(message.parts[0])):
            return wire_bytes(views[0]), None
        packed = self._sending.share(step.content)
        if packed is not None:
            return packed[1], packed[0]
        slot, buffer = self._sending.take(message.nbytes, step.content)
        start = 0
        for part, view in zip(message.parts, views, strict=True):
            pack(view, buffer[start : start + part.nbytes], _torch_dtype(part))
            start += part.nbytes
        return buffer, slot

    def _finish_send(self, deadline: Deadline, report: RankReport) -> None:
        flight = self._sending.under_way[0]
        with report.timing(_phase_of(flight.message.link)):
            flight.pending.wait(deadline)
        self._sending.finish_oldest()
        self._count_down(flight.forwarded, report)

    def _count_down(self, parts: Sequence[Part], report: RankReport) -> None:
        """Tell the target of every tensor for which one of `parts` was the last thing to do."""
        for part in parts:
            self._uses_left[part.tensor] -= 1
            if not self._uses_left[part.tensor]:
                assert self._target is not None
                with report.timing(Phase.INSTALL):
                    self._target.tensor_done(part.tensor)

    def _note_received(self, message: Message, verification: Verification) -> None:
        for part in message.parts:
            if verification.picks(part.tensor):
                verification.received(message, part, self._target_view(part))

    def _outgoing_view(self, part: Part, forwards: bool) -> Tensor:
        if forwards:
            return self._target_view(part)
        if self._source is None:
            raise PlanError(f"{part.tensor}: rank {self._transport.rank} is to send it and has no source")
        return _checked(self._source.view(part.tensor, part.region), part)

    def _target_view(self, part: Part) -> Tensor:
        if self._target is None:
            raise PlanError(f"{part.tensor}: rank {self._transport.rank} is to receive it and has no target")
        return _checked(self._target.view(part.tensor, part.region), part)


def _checked(view: Tensor, part: Part) -> Tensor:
    """`view` outside autograd. A wrong shape would broadcast silently, so it is refused."""
    if tuple(view.shape) != part.region.extent:
        raise PlanError(f"{part.tensor}: the view of {part.region} has shape {tuple(view.shape)}")
    return view.detach()


def _phase_of(link: Link) -> Phase:
    return Phase.EXCHANGE if link is Link.FAST else Phase.NETWORK


def _torch_dtype(part: Part) -> torch.dtype:
    found = getattr(torch, part.dtype)
    assert isinstance(found, torch.dtype)
    return found
