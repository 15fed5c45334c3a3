"""MessageMover: what happens to one message on one rank, from its bytes' memory to their memory; no scheduling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.plan.transfer import Message, Part, RankProgram
from nemo_rl_reshard.runtime.endpoint import Source, Target
from nemo_rl_reshard.runtime.lane import InFlight, Lane
from nemo_rl_reshard.runtime.report import Phase, RankReport
from nemo_rl_reshard.runtime.steps import Outgoing, Steps
from nemo_rl_reshard.runtime.verify import Verification
from nemo_rl_reshard.runtime.whole_tensors import WholeTensors
from nemo_rl_reshard.topology import Link
from nemo_rl_reshard.transport.deadline import Deadline
from nemo_rl_reshard.transport.protocol import Transport
from nemo_rl_reshard.transport.staging import is_plain, pack, torch_dtype, unpack, wire_bytes
from nemo_rl_reshard.transport.streams import StreamOrder

UNWRITTEN = 0xFF
"""Fills where bytes will land when a refit is verified: NaN in every float format that travels."""


class MessageMover:
    """One rank's messages, each in four moments: made ready, started, finished, told to the target.

    Bytes travel in place when they are plain on both counts: no cast, no strides, and on the transport's own device.
    Otherwise they are staged: `bucket_bytes` at most for sends, and for receives. Views are asked for when they are
    used and not kept, since a packed target allocates per refit and a trainer may move its storage.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        streams: StreamOrder,
        *,
        source: Source | None,
        target: Target | None,
        held: Mapping[str, Sequence[Region]],
        in_flight: int,
        bucket_bytes: int,
    ) -> None:
        self.steps = Steps.of(program, held)
        self._transport = transport
        self._streams = streams
        self._source = source
        self._target = None
        if target is not None:
            self._target = WholeTensors(target, program.leftovers, transport.device, bucket_bytes // 4)
        self._leftovers = frozenset(spec.name for spec in program.leftovers)
        self.sending = Lane([step.message for step in self.steps.outgoing], in_flight, bucket_bytes, transport.device)
        self.receiving = Lane(self.steps.incoming, in_flight, bucket_bytes, transport.device)
        self._uses_left: Counter[str] = Counter()

    @property
    def extra_bytes(self) -> int:
        """Bytes of staging that were ever used, which stay, and of leftovers: the most at once in the last refit."""
        leftovers = 0 if self._target is None else self._target.peak_bytes
        return self.sending.nbytes + self.receiving.nbytes + leftovers

    def begin(self) -> None:
        """Before the first message of a refit."""
        self._uses_left = Counter(self.steps.uses)
        if self._target is not None:
            self._target.begin()

    def ready_receive(self, message: Message, report: RankReport, verification: Verification) -> InFlight:
        """Find where the bytes of `message` arrive: the target itself, or a staging slot."""
        with report.timing(Phase.PACK):
            flight = self._landing(message)
            if verification.is_on:
                flight.buffer.fill_(UNWRITTEN)
        return flight

    def ready_send(
        self, step: Outgoing, deadline: Deadline, report: RankReport, verification: Verification
    ) -> InFlight | None:
        """Make the bytes of a message ready to leave. A local copy is made at once, and is None."""
        message = step.message
        views = [self._outgoing_view(*origin) for origin in zip(message.parts, step.forwards, strict=True)]
        with report.timing(Phase.VERIFY):
            for part, view in zip(message.parts, views, strict=True):
                if verification.picks(part.tensor):
                    verification.sent(message, part, view.to(torch_dtype(part.dtype)))
        self._count_sent(message, report)
        if message.dst != message.src:
            with report.timing(Phase.PACK):
                return self._leaving(step, views, deadline)
        self._count_received(message, report)
        with report.timing(Phase.PACK):
            for part, view in zip(message.parts, views, strict=True):
                self._target_view(part).copy_(view)
        self._note_received(message, report, verification)
        self._count_down(message.parts, report)
        return None

    def start(self, flight: InFlight, report: RankReport) -> None:
        """Start what was made ready, and put it under way."""
        message = flight.message
        report.num_messages += 1
        report.num_zero_copy += flight.slot is None
        if message.dst == self._transport.rank:
            flight.pending = self._transport.receive(flight.buffer, message.src)
            self._count_received(message, report)
            self.receiving.start(flight)
        else:
            flight.pending = self._transport.send(flight.buffer, message.dst)
            self.sending.start(flight)

    def finish_receive(self, deadline: Deadline, report: RankReport, verification: Verification) -> int:
        """Wait for the oldest receive and bring its bytes home; returns its order."""
        flight = self.receiving.under_way[0]
        message = flight.message
        self._wait(flight, deadline, report)
        with report.timing(Phase.PACK):
            if flight.slot is not None:
                self._unpack(flight, deadline)
            self.receiving.finish_oldest()
        self._note_received(message, report, verification)
        self._count_down(message.parts, report)
        return message.order

    def finish_send(self, deadline: Deadline, report: RankReport) -> None:
        """Wait for the oldest send and free its slot."""
        flight = self.sending.under_way[0]
        self._wait(flight, deadline, report)
        self.sending.finish_oldest()
        self._count_down(flight.forwarded, report)

    def _wait(self, flight: InFlight, deadline: Deadline, report: RankReport) -> None:
        assert flight.pending is not None
        with report.timing(_phase_of(flight.message.link)):
            flight.pending.wait(deadline)

    def _landing(self, message: Message) -> InFlight:
        view = self._target_view(message.parts[0])
        if len(message.parts) == 1 and self._travels_in_place(view, message.parts[0]):
            return InFlight(message, wire_bytes(view), None)
        slot, buffer = self.receiving.take(message.nbytes, view.device)
        return InFlight(message, buffer, slot)

    def _leaving(self, step: Outgoing, views: Sequence[Tensor], deadline: Deadline) -> InFlight:
        """The bytes of a message: live storage where that is what travels, else packed into a staging slot."""
        message = step.message
        if len(views) == 1 and self._travels_in_place(views[0], message.parts[0]):
            return InFlight(message, wire_bytes(views[0]), None, step.forwarded)
        packed = self.sending.share(step.content)
        if packed is not None:
            return InFlight(message, packed[1], packed[0], step.forwarded)
        slot, buffer = self.sending.take(message.nbytes, views[0].device, step.content)
        self._pack(message, views, slot, buffer, deadline)
        return InFlight(message, buffer, slot, step.forwarded)

    def _pack(self, message: Message, views: Sequence[Tensor], slot: int, buffer: Tensor, deadline: Deadline) -> None:
        on_gpu = buffer.device.type != "cpu"
        start = 0
        for part, view in zip(message.parts, views, strict=True):
            into = buffer[start : start + part.nbytes]
            if on_gpu and view.device.type == "cpu":
                # Only these bytes, and through pinned memory, which the GPU fetches while the host goes on.
                twin = self.sending.host_twin(slot, message.nbytes)[start : start + part.nbytes]
                pack(view, twin, torch_dtype(part.dtype))
                into.copy_(twin, non_blocking=True)
            else:
                pack(view, into, torch_dtype(part.dtype))
            start += part.nbytes
        if not on_gpu and any(view.device.type != "cpu" for view in views):
            self._streams.settle(deadline, f"copying {message.nbytes} bytes from the GPU")  # the host sends them next

    def _unpack(self, flight: InFlight, deadline: Deadline) -> None:
        start = 0
        to_gpu = False
        for part in flight.message.parts:
            view = self._target_view(part)
            unpack(flight.buffer[start : start + part.nbytes], view, torch_dtype(part.dtype))
            to_gpu = to_gpu or view.device.type != "cpu"
            start += part.nbytes
        if to_gpu and flight.buffer.device.type == "cpu":
            self._streams.settle(deadline, f"copying {start} bytes to the GPU")  # the slot is written by the host next

    def _count_down(self, parts: Sequence[Part], report: RankReport) -> None:
        """Tell the target of every tensor for which one of `parts` was the last thing to do."""
        for part in parts:
            self._uses_left[part.tensor] -= 1
            if not self._uses_left[part.tensor]:
                assert self._target is not None
                with report.timing(Phase.LEFTOVER if part.tensor in self._leftovers else Phase.INSTALL):
                    self._target.tensor_done(part.tensor)

    def _count_sent(self, message: Message, report: RankReport) -> None:
        leftover = self._leftover_bytes(message)
        report.bytes_sent[message.link] += message.nbytes - leftover
        report.leftover_bytes_sent += leftover

    def _count_received(self, message: Message, report: RankReport) -> None:
        leftover = self._leftover_bytes(message)
        report.bytes_received[message.link] += message.nbytes - leftover
        report.leftover_bytes_received += leftover

    def _leftover_bytes(self, message: Message) -> int:
        if not self._leftovers:
            return 0
        return sum(part.nbytes for part in message.parts if part.tensor in self._leftovers)

    def _note_received(self, message: Message, report: RankReport, verification: Verification) -> None:
        with report.timing(Phase.VERIFY):
            for part in message.parts:
                if verification.picks(part.tensor):
                    verification.received(message, part, self._target_view(part))

    def _travels_in_place(self, view: Tensor, part: Part) -> bool:
        return view.device == self._transport.device and is_plain(view, torch_dtype(part.dtype))

    def _outgoing_view(self, part: Part, forwards: bool) -> Tensor:
        if forwards:
            return self._target_view(part)
        if self._source is None:
            raise PlanError(f"{part.tensor}: rank {self._transport.rank} is to send it and has no source")
        return self._checked(self._source.view(part.tensor, part.region), part)

    def _target_view(self, part: Part) -> Tensor:
        if self._target is None:
            raise PlanError(f"{part.tensor}: rank {self._transport.rank} is to receive it and has no target")
        return self._checked(self._target.view(part.tensor, part.region), part)

    def _checked(self, view: Tensor, part: Part) -> Tensor:
        """`view` outside autograd. A wrong shape would broadcast silently, so it is refused."""
        if tuple(view.shape) != part.region.extent:
            raise PlanError(f"{part.tensor}: the view of {part.region} has shape {tuple(view.shape)}")
        self._streams.meet(view.device)
        return view.detach()


def _phase_of(link: Link) -> Phase:
    return Phase.EXCHANGE if link is Link.FAST else Phase.NETWORK
