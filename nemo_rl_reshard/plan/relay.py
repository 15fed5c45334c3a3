"""Relays: how much of what a trainer holds it sends itself, and how much target ranks pass on between domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from nemo_rl_reshard.plan.kinds import Kind

_LONGEST_CHAIN = 8
"""Domains. Each adds a step before the last of them is done."""
ALL = 1 << 16
"""The share of a trainer that sends everything itself; shares are whole numbers, so every machine rounds alike."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What ranks would send over the network if replicas shared evenly and nothing were relayed.

    `sending` maps trainers to bytes; `direct` those that shall not send all of it themselves to how much of every
    `ALL` bytes they should. `network_share` is what a trainer sends over the network, on average and with relays, for
    each byte that a target rank receives by any link.
    """

    sending: Mapping[int, int]
    direct: Mapping[int, int]
    network_share: Fraction = Fraction(1)

    def is_even(self, ranks: Iterable[int]) -> bool:
        """Whether these trainers have as much to send as each other, to within a hundredth."""
        loads = [self.sending.get(rank, 0) for rank in ranks]
        return max(loads, default=0) * 100 <= min(loads, default=0) * 101


def look_ahead(kinds: Iterable[Kind], domain_of: Mapping[int, int]) -> Outlook:
    """The outlook for these tensors.

    A trainer shall not send everything itself when that is more than the busiest receiver takes in at best: the rest of
    the refit waits for that receiver anyway, so sending more directly gains nothing. What is beyond goes in chains
    instead: a target rank that received a region passes it on to the next domain that needs it. No target rank then
    sends more than it received.
    """
    sending: Counter[int] = Counter()
    entering: Counter[int] = Counter()
    receiving: Counter[int] = Counter()
    received = 0
    taking: set[int] = set()
    for kind in kinds:
        send: Counter[int] = Counter()
        enter: Counter[int] = Counter()
        receive: Counter[int] = Counter()
        takers = {role for demand in kind.demands for role in demand.needers}
        for demand in kind.demands:
            nbytes = demand.region.numel * kind.item_size
            received += nbytes * (len(demand.needers) - len({*demand.needers} & {*demand.near})) * kind.num_tensors
            if demand.near:
                continue
            enter[demand.needers[0]] += nbytes
            if len(demand.needers) == 1:
                receive[demand.needers[0]] += nbytes
            for role in demand.holders:
                send[role] += nbytes // len(demand.holders)
        for crew, count in kind.casts():
            for role, nbytes in send.items():
                sending[crew[role]] += nbytes * count
            for role, nbytes in receive.items():
                receiving[crew[role]] += nbytes * count
            for role, nbytes in enter.items():
                entering[domain_of[crew[role]]] += nbytes * count
            taking.update(crew[role] for role in takers)
    members = Counter(domain_of.values())
    peak = max(
        (
            *(Fraction(nbytes, members[domain]) for domain, nbytes in entering.items()),
            *(Fraction(nbytes) for nbytes in receiving.values()),
        ),
        default=Fraction(0),
    )
    # With relays no more than the peak, but everything once at least.
    leaving = sum(
        (min(Fraction(nbytes), max(peak, Fraction(nbytes, len(entering)))) for nbytes in sending.values()), Fraction(0)
    )
    return Outlook(
        sending,
        {rank: int(peak * ALL / nbytes) for rank, nbytes in sending.items() if nbytes > peak},
        leaving * len(taking) / (len(sending) * received) if received and sending else Fraction(1),
    )


class Chains:
    """Shares out, region by region, which domains get it from a trainer and which from the domain before them.

    Over many regions of one group the trainers' part comes to the share asked for, to within one region.
    """

    def __init__(self) -> None:
        self._owed: dict[tuple[int, Hashable], int] = {}

    def distances(self, num_domains: int, share: int, group: Hashable) -> tuple[int, ...]:
        """For every place the distance to the start of its chain: 0 is sent by a trainer, others by the one before.

        The first is 0. Regions of one group come from and go to the same ranks, so that none has all the long chains.
        """
        if num_domains == 1 or share >= ALL:
            return (0,) * num_domains
        owed = self._owed.get((share, group), ALL // 2) + share * num_domains
        num_heads = max(-(-num_domains // _LONGEST_CHAIN), min(num_domains, owed // ALL))
        self._owed[share, group] = max(0, owed - num_heads * ALL)
        distances = []
        since = 0
        for place in range(num_domains):
            starts = place * num_heads // num_domains != (place - 1) * num_heads // num_domains
            since = 0 if starts else since + 1
            distances.append(since)
        return tuple(distances)


def in_chains(sent: Sequence[int], distances: Sequence[int], turn: int) -> list[int]:
    """For every place in the chains the domain that takes it; `sent` is what its first receiver has sent so far.

    Those with most to send already are last in a chain and pass nothing on. Of equals, `turn` decides.
    """
    order = [(turn + place) % len(sent) for place in range(len(sent))]
    if not any(distances):
        return order
    order.sort(key=sent.__getitem__)
    ends = [following == 0 for following in (*distances[1:], 0)]
    passing, ending = iter(order), iter(order[len(order) - sum(ends) :])
    return [next(ending if end else passing) for end in ends]
