"""MessageClock: how long a plan takes when its messages are followed one by one, to hold the step clock against.

Nothing here is counted in steps. Every rank runs its lowered program as the executors of `runtime` do, one call after
the other: it posts receives, packs and posts sends, waits for the oldest message under way and installs it. A message
moves once both of its ends have posted it. Every message is staged, and a latency passes between its end at the sender
and its arrival.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import count

from equipment.shared_links import AT_ONCE, Road, SharedLinks
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.plan.rounds import RoundLimits, round_of, round_starts
from nemo_rl_reshard.plan.transfer import Message
from nemo_rl_reshard.runtime.handout import DEFAULT_IN_FLIGHT
from nemo_rl_reshard.runtime.steps import NOTHING, Outgoing, Steps
from nemo_rl_reshard.simulate.seconds import INSTALL_PASSES, PACK_PASSES
from nemo_rl_reshard.topology import Link, Topology


@dataclass(frozen=True)
class Wait:
    """Until message `order` has arrived, or has left."""

    order: int
    arrived: bool


Doing = Generator["float | Wait | list[Message]", None, None]
"""What one rank does: seconds of work, waits, and messages that it posts together."""


def message_clock(
    plan: Plan, source: Catalog, topology: Topology, *, in_flight: int = DEFAULT_IN_FLIGHT, in_rounds: bool = False
) -> float:
    """Seconds from the first call to the last rank's end.

    `in_rounds`: as over NCCL, by rounds on streams that do one round after the other; else by windows of messages.
    """
    programs = {rank: lower(plan, rank) for rank in plan.ranks}
    bucket_bytes, message_bytes = plan.options.bucket_bytes, plan.options.largest_message
    limits = RoundLimits.of(in_flight=in_flight, bucket_bytes=bucket_bytes, message_bytes=message_bytes)
    starts = round_starts(plan, limits.messages)
    memory = _Memory(topology.memory_bytes_per_s)
    ranks: dict[int, Doing] = {}
    for rank, program in programs.items():
        held = source.layouts if rank in plan.sources else {}
        steps = Steps.of(program, {name: layout.regions_of(rank) for name, layout in held.items()})
        if in_rounds:
            ranks[rank] = _by_rounds(steps, memory, limits, starts)
        else:
            ranks[rank] = _by_windows(steps, memory, in_flight, bucket_bytes)
    messages = [message for program in programs.values() for message in program.messages if message.src != message.dst]
    return _World(ranks, messages, topology, one_round_at_a_time=in_rounds).run()


@dataclass(frozen=True)
class _Memory:
    """Seconds that a rank's own copies take."""

    bytes_per_s: float

    def pack_s(self, message: Message) -> float:
        return PACK_PASSES * message.nbytes / self.bytes_per_s

    def install_s(self, message: Message) -> float:
        return INSTALL_PASSES * message.nbytes / self.bytes_per_s


def _by_windows(steps: Steps, memory: _Memory, in_flight: int, bucket_bytes: int) -> Doing:
    """As runtime/executor.py: a window for each direction, emptied in order, with the slots of runtime/lane.py."""
    incoming, outgoing = deque(steps.incoming), deque(steps.outgoing)
    largest_in = max((message.nbytes for message in incoming), default=1)
    largest_out = max((step.message.nbytes for step in outgoing), default=1)
    room_in = max(1, min(in_flight, bucket_bytes // largest_in))
    room_out = max(1, min(in_flight, bucket_bytes // largest_out))
    receiving: deque[Message] = deque()
    sending: deque[Outgoing] = deque()
    arrived = NOTHING
    while incoming or outgoing or receiving or sending:
        while incoming and len(receiving) < room_in:
            receiving.append(incoming.popleft())
            yield [receiving[-1]]
        if outgoing and outgoing[0].after <= arrived and len(sending) < room_out:
            step = outgoing.popleft()
            yield from _packed(step, sending, memory)
            if step.message.src != step.message.dst:
                sending.append(step)
                yield [step.message]
        elif receiving and (not sending or receiving[0].order < sending[0].message.order):
            message = receiving.popleft()
            yield Wait(message.order, arrived=True)
            yield memory.install_s(message)
            arrived = message.order
        else:
            yield Wait(sending.popleft().message.order, arrived=False)


def _packed(step: Outgoing, under_way: Sequence[Outgoing], memory: _Memory) -> Doing:
    """Pack a message, unless one under way has the same bytes."""
    if all(other.content != step.content for other in under_way):
        yield memory.pack_s(step.message)


def _by_rounds(steps: Steps, memory: _Memory, limits: RoundLimits, starts: Sequence[int]) -> Doing:
    """As runtime/round_executor.py: a round is packed and posted as one, and finished before the one after next."""
    rounds: dict[int, tuple[list[Message], list[Outgoing]]] = {}
    for message in steps.incoming:
        rounds.setdefault(round_of(message.order, starts), ([], []))[0].append(message)
    for step in steps.outgoing:
        rounds.setdefault(round_of(step.message.order, starts), ([], []))[1].append(step)
    under_way: deque[tuple[list[Message], list[Outgoing]]] = deque()
    arrived = NOTHING
    for number in sorted(rounds):
        receives, sends = rounds[number]
        after = max((step.after for step in sends), default=NOTHING)
        while under_way and (len(under_way) == limits.under_way or after > arrived):
            arrived = max(arrived, *[message.order for message in under_way[0][0]], NOTHING)
            yield from _finished(*under_way.popleft(), memory)
        packed: list[Outgoing] = []
        for step in sends:
            yield from _packed(step, packed, memory)
            packed.append(step)
        yield [*receives, *(step.message for step in sends if step.message.src != step.message.dst)]
        under_way.append((receives, sends))
    while under_way:
        yield from _finished(*under_way.popleft(), memory)


def _finished(receives: list[Message], sends: list[Outgoing], memory: _Memory) -> Doing:
    for message in receives:
        yield Wait(message.order, arrived=True)
        yield memory.install_s(message)
    for step in sends:
        if step.message.src != step.message.dst:
            yield Wait(step.message.order, arrived=False)


class _World:
    """All ranks and the links between them, as events in order of time."""

    def __init__(
        self, ranks: dict[int, Doing], messages: Sequence[Message], topology: Topology, *, one_round_at_a_time: bool
    ) -> None:
        self._ranks = ranks
        self._in_order = one_round_at_a_time
        nic_of = topology.nics_with(ranks)
        rate = {
            Link.NETWORK: topology.network_bytes_per_s * topology.wire_efficiency,
            Link.FAST: topology.fast_bytes_per_s * topology.wire_efficiency,
        }
        self._latency = {Link.NETWORK: topology.network_latency_s, Link.FAST: topology.fast_latency_s}
        roads: dict[tuple[int, int, Link], Road] = {}
        for src, dst, link in {(message.src, message.dst, message.link) for message in messages}:
            ends = (nic_of[src], nic_of[dst]) if link is Link.NETWORK else (src, dst)
            roads[src, dst, link] = Road((link, ends[0]), (link, ends[1]), rate[link], (src, dst))
        self._roads = roads
        self._links = SharedLinks(roads.values())
        self._message = {message.order: message for message in messages}
        self._posted: Counter[int] = Counter()
        self._left: set[int] = set()
        self._arrived: set[int] = set()
        self._waiting: dict[int, Wait] = {}
        self._batches: dict[int, deque[list[Message]]] = {rank: deque() for rank in ranks}
        self._unfinished: Counter[int] = Counter()
        self._events: list[tuple[float, int, str, int]] = []
        self._number = count()
        self._now = 0.0

    def run(self) -> float:
        for rank in self._ranks:
            self._go_on(rank)
        while True:
            following = self._events[0][0] if self._events else float("inf")
            now = min(following, self._links.next_end())
            if now == float("inf"):
                break
            self._now = now
            for order in self._links.go_to(now):
                self._has_left(order)
            while self._events and self._events[0][0] <= now + AT_ONCE:
                _, _, what, number = heapq.heappop(self._events)
                (self._has_arrived if what == "arrived" else self._go_on)(number)
        assert not self._waiting, f"ranks wait forever: {self._waiting}"
        assert len(self._arrived) == len(self._message)
        return self._now

    def _go_on(self, rank: int) -> None:
        """Let a rank do what it does until it works or waits."""
        for doing in self._ranks[rank]:
            if isinstance(doing, list):
                self._post(rank, doing)
            elif isinstance(doing, Wait):
                if doing.order not in (self._arrived if doing.arrived else self._left):
                    self._waiting[rank] = doing
                    return
            elif doing > 0:
                self._at(self._now + doing, "work done", rank)
                return

    def _post(self, rank: int, messages: list[Message]) -> None:
        if self._in_order and self._unfinished[rank]:
            self._batches[rank].append(messages)
        else:
            self._start(rank, messages)

    def _start(self, rank: int, messages: list[Message]) -> None:
        self._unfinished[rank] += len(messages)
        for message in messages:
            self._posted[message.order] += 1
            if self._posted[message.order] == 2:
                self._links.add(self._roads[message.src, message.dst, message.link], message.order, message.nbytes)

    def _has_left(self, order: int) -> None:
        message = self._message[order]
        self._left.add(order)
        self._at(self._now + self._latency[message.link], "arrived", order)
        self._ended(message.src, Wait(order, arrived=False))

    def _has_arrived(self, order: int) -> None:
        self._arrived.add(order)
        self._ended(self._message[order].dst, Wait(order, arrived=True))

    def _ended(self, rank: int, what: Wait) -> None:
        self._unfinished[rank] -= 1
        while self._batches[rank] and not self._unfinished[rank]:
            self._start(rank, self._batches[rank].popleft())
        if self._waiting.get(rank) == what:
            del self._waiting[rank]
            self._go_on(rank)

    def _at(self, time: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (time, next(self._number), what, number))
