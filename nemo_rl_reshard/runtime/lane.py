"""Lane: the messages of one direction that are under way, and the staging slots they travel in."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_reshard.plan.transfer import Message, Part
from nemo_rl_reshard.transport.protocol import Pending
from nemo_rl_reshard.transport.staging import StagingSlots


@dataclass(slots=True)
class InFlight:
    """A message that is ready to start, or was started if it is `pending`; the buffer it travels in, the slot that
    buffer belongs to, if it is staged, and the parts that it forwards."""

    message: Message
    buffer: Tensor
    slot: int | None
    forwarded: tuple[Part, ...] = ()
    pending: Pending | None = None


class Lane:
    """One direction: the messages under way, oldest first, and the slots of those that are staged.

    Slots are allocated when the first message needs one, so a rank whose messages all travel in place has none. Bytes
    that go to several ranks are packed once: a message joins the slot of one under way that carries the same.
    """

    def __init__(self, messages: Sequence[Message], in_flight: int, bucket_bytes: int, device: torch.device) -> None:
        """Slots on `device`, for as many of `messages` as fit `bucket_bytes`, `in_flight` at most and one at least."""
        self.under_way: deque[InFlight] = deque()
        self._in_flight = in_flight
        self._device = device
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

    def take(self, nbytes: int, weights: torch.device, content: int | None = None) -> tuple[int, Tensor]:
        """A slot's number and its first `nbytes` bytes, to be filled with `content` from or for `weights`."""
        if self._slots is None:
            pinned = self._device.type == "cpu" and weights.type == "cuda"
            self._slots = StagingSlots(self._num_slots, self._slot_bytes, self._device, pinned=pinned)
        slot, buffer = self._slots.take(nbytes)
        self._sharing[slot] = 1
        if content is not None:
            self._packed[content] = (slot, buffer)
        return slot, buffer

    def host_twin(self, slot: int, nbytes: int) -> Tensor:
        """The first `nbytes` bytes of the pinned host memory that belongs to a taken slot on a GPU."""
        assert self._slots is not None
        return self._slots.host_twin(slot, nbytes)

    def share(self, content: int) -> tuple[int, Tensor] | None:
        """The slot under way that already holds `content`, for another message; None if there is none."""
        found = self._packed.get(content)
        if found is not None:
            self._sharing[found[0]] += 1
        return found

    def start(self, flight: InFlight) -> None:
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
