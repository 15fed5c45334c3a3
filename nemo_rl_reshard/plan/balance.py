"""Balance: which replica sends each demand and which receives it first, by a rule fixed by bytes and rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

import numpy as np
from numpy.typing import NDArray

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.plan.overlay import Demand
from nemo_rl_reshard.plan.pieces import WAVES, waves_of
from nemo_rl_reshard.plan.plan import Crew, Move, columns_of
from nemo_rl_reshard.plan.relay import ALL, Chains, Outlook, in_chains
from nemo_rl_reshard.topology import Link

_MOST_VARIANTS = 24  # divisible by 2, 3, 4, 6, 8 and 12 replicas
_MOST_DEMANDS = 1024  # of all variants of a template together, unless replicas need more to take turns
_MOST_PIECES = 512  # likewise, whatever replicas need: a tensor of many pieces is nearly even in itself

Moves = tuple[Move, ...]


@dataclass(slots=True)
class Loads:
    """Bytes that each rank sends and receives so far, by kind of link."""

    network_send: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    network_recv: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    fast_send: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def of(self, crew: Crew) -> _RoleLoads:
        """The same by role, to count on."""
        network_send, network_recv, fast_send = self.network_send, self.network_recv, self.fast_send
        return _RoleLoads(
            [network_send[rank] for rank in crew],
            [network_recv[rank] for rank in crew],
            [fast_send[rank] for rank in crew],
        )

    def add(self, crew: Crew, by_role: NDArray[np.int64]) -> None:
        """Add bytes by kind of load, in the order of the fields, and role."""
        for known, counted in zip((self.network_send, self.network_recv, self.fast_send), by_role, strict=True):
            for role in np.flatnonzero(counted).tolist():
                known[crew[role]] += int(counted[role])

    def take(self, crew: Crew, counted: _RoleLoads) -> None:
        """Keep what was counted by role."""
        self.network_send.update(zip(crew, counted.network_send, strict=True))
        self.network_recv.update(zip(crew, counted.network_recv, strict=True))
        self.fast_send.update(zip(crew, counted.fast_send, strict=True))


@dataclass(frozen=True, slots=True)
class _RoleLoads:
    """Bytes by role of one crew. Roles of a side ascend with ranks, so the first of equals is the lowest rank."""

    network_send: list[int]
    network_recv: list[int]
    fast_send: list[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """All tensors of one kind before choosing: its demands after sharing, in roles, and how many tensors each crew has.

    `pieces` are the distinct regions, in order; domains that need the same one have a demand each. The first
    `num_holders` roles are the trainers that hold the tensor.
    """

    demands: tuple[Demand, ...]
    item_size: int
    num_holders: int
    crews: tuple[tuple[Crew, int], ...]

    @property
    def pieces(self) -> tuple[Region, ...]:
        """What the moves index."""
        return tuple(dict.fromkeys(demand.region for demand in self.demands))

    @property
    def freedom(self) -> int:
        """The fewest replicas that could send one of the demands; 0 when all is nearby."""
        return min((len(demand.holders) for demand in self.demands if not demand.near), default=0)

    @property
    def busiest_send(self) -> int:
        """Bytes of one tensor that a trainer sends over the network when replicas share evenly."""
        sends: Counter[int] = Counter()
        for demand in self.demands:
            if not demand.near:
                for role in demand.holders:
                    sends[role] += demand.region.numel * self.item_size // len(demand.holders)
        return max(sends.values(), default=0)

    @property
    def busiest_receive(self) -> int:
        """Bytes of one tensor that a rank receives."""
        receives: Counter[int] = Counter()
        for demand in self.demands:
            for role in demand.needers:
                if role not in demand.near:
                    receives[role] += demand.region.numel * self.item_size
        return max(receives.values(), default=0)

    @property
    def is_even(self) -> bool:
        """Whether every group of replicas has equally many demands of each size a member: a tensor alone is even."""
        by_needers = Counter((demand.needers, demand.region.numel) for demand in self.demands if not demand.near)
        by_holders = Counter((demand.holders, demand.region.numel) for demand in self.demands if not demand.near)
        return (
            all(len(demand.near) <= 1 for demand in self.demands)
            and not any(count % len(needers) for (needers, _), count in by_needers.items())
            and not any(count % len(holders) for (holders, _), count in by_holders.items())
        )

    @property
    def ways(self) -> int:
        """How many tensors it takes until every replica and every needer has had its turn at each demand, or so."""
        ways = 1
        for demand in self.demands:
            ways = lcm(ways, *((len(demand.near),) if demand.near else (len(demand.holders), len(demand.needers))))
            if ways > _MOST_VARIANTS:
                return _MOST_VARIANTS
        return ways


@dataclass(frozen=True, slots=True)
class Cast:
    """What was chosen for one kind: distinct `variants`, and for each crew those that its tensors use in turn.

    With `in_turn` all crews have the same, and take turns with each other.
    """

    variants: tuple[Moves, ...]
    of_crew: tuple[tuple[int, ...], ...]
    in_turn: bool = False


def assign(choices: Sequence[Choice], bucket_bytes: int, outlook: Outlook) -> list[Cast]:
    """For each choice its variants, each the moves that meet every demand once, and who uses which.

    Tensor number i of a crew is meant to use the crew's variant i modulo their number. Candidates are taken by present
    load, in turns where loads are equal; what is even in itself, and then what few can send, is counted first, so that
    the rest can make up for it. Where many domains need a large tensor, chains keep its trainers from sending more than
    about half a step's worth at once.
    """
    loads = Loads()
    found: list[Cast] = [Cast((), ())] * len(choices)
    even = [
        choice.is_even and all(outlook.is_even(crew[: choice.num_holders]) for crew, _ in choice.crews)
        for choice in choices
    ]
    for index in sorted(range(len(choices)), key=lambda index: (not even[index], choices[index].freedom, index)):
        chooser = _Chooser(choices[index], loads, outlook, bucket_bytes)
        found[index] = chooser.in_turn() if even[index] else chooser.by_load()
    return found


class _Chooser:
    """Makes the variants of one choice; equal ones, of whichever crews, are one."""

    def __init__(self, choice: Choice, loads: Loads, outlook: Outlook, bucket_bytes: int) -> None:
        self._choice = choice
        self._loads = loads
        self._chains = Chains()
        self._direct_share = outlook.direct
        self._variants: dict[Moves, int] = {}
        self._sizes = [demand.region.numel * choice.item_size for demand in choice.demands]
        place = {region: index for index, region in enumerate(choice.pieces)}
        self._piece = [place[demand.region] for demand in choice.demands]
        fans: dict[Region, list[int]] = {}
        # Large demands first: small ones can then even out what is left.
        for index in sorted(range(len(self._sizes)), key=lambda index: (-self._sizes[index], index)):
            fans.setdefault(choice.demands[index].region, []).append(index)
        self._fans = tuple(fans.values())
        self._most_domains = max(map(len, self._fans), default=1)
        self._few = max(1, min(_MOST_VARIANTS, _MOST_PIECES // max(1, len(self._fans))))
        # What a step brings over the network. A trainer that sent more at once would be alone on the wire meanwhile.
        pace = max(1, int(bucket_bytes * outlook.network_share))
        busiest_send = choice.busiest_send
        self._most_direct = min(ALL, ALL * pace // max(1, 2 * busiest_send))
        at_once = max(busiest_send * self._most_direct // ALL, busiest_send // self._most_domains)
        num_waves = max(-(-2 * at_once // pace), -(-choice.busiest_receive * WAVES // bucket_bytes))
        first = [choice.demands[fan[0]].holders for fan in self._fans]
        needed_by = [tuple(choice.demands[index].needers for index in fan) for fan in self._fans]
        ways = tuple(zip(first, needed_by, strict=True))
        sizes = [self._sizes[fan[0]] for fan in self._fans]
        waves = waves_of(ways, sizes, max(1, min(len(self._fans), num_waves)))
        # Wave by wave, so that the pieces of each take turns over all replicas and all first receivers.
        order = sorted(range(len(waves)), key=waves.__getitem__)
        self._fans = tuple(self._fans[place] for place in order)
        self._waves = tuple(waves[place] for place in order)
        self._ways = tuple(ways[place] for place in order)

    def in_turn(self) -> Cast:
        """All crews use the same moves, which are even in themselves; domains take turns at being first."""
        crews = self._choice.crews
        # The busiest trainers decide how much goes through chains.
        shares = tuple(map(min, zip(*(self._shares(crew) for crew, _ in crews), strict=True)))
        in_turns = self._most_direct < ALL or any(share < ALL for share in shares)
        turns = min(self._most_domains, self._few, sum(count for _, count in crews)) if in_turns else 1
        alone = [Loads().of(crews[0][0]) for _ in range(turns)]
        variants = tuple(self._number(self._choose(shares, turn, 1, loads)) for turn, loads in enumerate(alone))
        of_tensor = np.array([[loads.network_send, loads.network_recv, loads.fast_send] for loads in alone])
        for crew, num_tensors in crews:
            base, extra = divmod(num_tensors, turns)
            uses = np.array([base + (way < extra) for way in range(turns)])
            self._loads.add(crew, np.tensordot(uses, of_tensor, axes=1))
        return Cast(tuple(self._variants), (variants,) * len(crews), in_turn=True)

    def by_load(self) -> Cast:
        """Every crew takes, tensor by tensor in turn, what evens out the loads best."""
        of_crew = []
        most_variants = self._most_variants()
        for place, (crew, num_tensors) in enumerate(self._choice.crews):
            shares = self._shares(crew)
            num_variants = min(most_variants, num_tensors)
            base, extra = divmod(num_tensors, num_variants)
            loads = self._loads.of(crew)
            of_crew.append(
                tuple(
                    self._number(self._choose(shares, place + way, base + (way < extra), loads))
                    for way in range(num_variants)
                )
            )
            self._loads.take(crew, loads)
        return Cast(tuple(self._variants), tuple(of_crew))

    def _most_variants(self) -> int:
        """1 when nothing can be chosen, else as many as help the tensors of one crew to share evenly."""
        ways = self._choice.ways
        if ways == 1:
            return 1
        # At cluster scale every tensor spreads over many ranks itself, so a few variants share evenly.
        most = min(_MOST_VARIANTS, max(ways, _MOST_DEMANDS // len(self._choice.demands)))
        return min(self._few, most // ways * ways)

    def _number(self, moves: Moves) -> int:
        return self._variants.setdefault(moves, len(self._variants))

    def _shares(self, crew: Crew) -> tuple[int, ...]:
        """For every fan the share of its domains that trainers serve themselves."""
        if not self._direct_share:
            return ()
        shares = []
        for fan in self._fans:
            holders = self._choice.demands[fan[0]].holders
            # The least loaded replica decides: the others will leave the work to it.
            shares.append(max(self._direct_share.get(crew[role], ALL) for role in holders))
        return tuple(shares)

    def _choose(self, shares: Sequence[int], turn: int, weight: int, loads: _RoleLoads) -> Moves:
        """Variant number `turn`, by lag and piece, for `weight` tensors of the crew whose `loads` these are."""
        moves: list[Move] = []
        for place, fan in enumerate(self._fans):
            demands = [self._choice.demands[index] for index in fan]
            piece, nbytes = self._piece[fan[0]], self._sizes[fan[0]] * weight
            far = [demand for demand in demands if not demand.near]
            for demand in demands:
                if demand.near:
                    moves.extend(_from_near(piece, demand, nbytes, loads))
            if far:
                share = min(shares[place] if shares else ALL, self._most_direct)
                distances = self._chains.distances(len(far), share, self._ways[place])
                moves.extend(_from_far(piece, far, distances, self._waves[place], turn + place, nbytes, loads))
        return _alternating(moves)


def _from_far(
    piece: int,
    demands: Sequence[Demand],
    distances: Sequence[int],
    wave: int,
    turn: int,
    nbytes: int,
    loads: _RoleLoads,
) -> list[Move]:
    """Moves of one region into every domain of `demands`, from trainers or along chains, and on inside the domains.

    Of equally loaded candidates `turn` decides, so that the regions of one tensor already come by different ways.
    """
    sent, received = loads.network_send, loads.network_recv
    entries = []
    for demand in demands:
        entry = min(_turned(demand.needers, turn), key=received.__getitem__)
        received[entry] += nbytes
        loads.fast_send[entry] += nbytes * (len(demand.needers) - 1)
        entries.append(entry)
    moves = []
    before = -1
    for index, distance in zip(in_chains([sent[entry] for entry in entries], distances, turn), distances, strict=True):
        demand, entry, lag = demands[index], entries[index], distance + wave
        src = before if distance else min(_turned(demand.holders, turn), key=sent.__getitem__)
        sent[src] += nbytes
        moves.append(Move(piece, src, entry, Link.NETWORK, lag))
        moves.extend([Move(piece, entry, dst, Link.FAST, lag + 1) for dst in demand.needers if dst != entry])
        before = entry
    return moves


def _alternating(moves: Sequence[Move]) -> Moves:
    """By lag, and inside a lag in turns over the senders: where all at once is too much, none sends alone."""
    piece, src, dst, lag = columns_of(moves)
    by_sender = np.lexsort((dst, piece, src, lag))
    starts = np.append(True, (np.diff(lag[by_sender]) != 0) | (np.diff(src[by_sender]) != 0))
    place = np.arange(len(moves))
    nth = np.empty(len(moves), dtype=np.int64)
    nth[by_sender] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return tuple([moves[index] for index in np.lexsort((dst, src, piece, nth, lag)).tolist()])


def _turned(roles: tuple[int, ...], turn: int) -> tuple[int, ...]:
    first = turn % len(roles)
    return roles[first:] + roles[:first]


def _from_near(piece: int, demand: Demand, nbytes: int, loads: _RoleLoads) -> list[Move]:
    """Moves of a demand that some rank of the needers' own domain holds: copies at home, fast links elsewhere."""
    moves = []
    for dst in demand.needers:
        if dst in demand.near:
            moves.append(Move(piece, dst, dst, Link.LOCAL, 0))
            continue
        src = min(demand.near, key=loads.fast_send.__getitem__)
        loads.fast_send[src] += nbytes
        moves.append(Move(piece, src, dst, Link.FAST, 0))
    return moves
