"""Balance: which replica sends each demand and which receives it first, by a rule fixed by bytes and rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import bounded
from nemo_rl_reshard.plan.overlay import Demand
from nemo_rl_reshard.plan.plan import Move
from nemo_rl_reshard.topology import Link

_MOST_VARIANTS = 24  # divisible by 2, 3, 4, 6, 8 and 12 replicas
_MOST_DEMANDS = 1024  # of all variants of a template together, unless replicas need more to take turns
_SMALL_BYTES = 1 << 20  # a piece below this gains nothing from being shared


@dataclass(slots=True)
class Loads:
    """Bytes that each rank sends and receives so far, by kind of link."""

    network_send: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    network_recv: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    fast_send: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass(frozen=True, slots=True)
class Choice:
    """All tensors of one template before choosing: its demands after sharing, and how many tensors use them."""

    demands: tuple[Demand, ...]
    item_size: int
    num_tensors: int

    @property
    def num_variants(self) -> int:
        """1 when every demand has one sender and one first receiver, else as many as help to share evenly."""
        ways = 1
        for demand in self.demands:
            ways = lcm(ways, *((len(demand.near),) if demand.near else (len(demand.holders), len(demand.needers))))
            if ways > _MOST_VARIANTS:
                return min(_MOST_VARIANTS, self.num_tensors)
        if ways == 1:
            return 1
        # At cluster scale every tensor spreads over many ranks itself, so a few variants share evenly.
        most = min(_MOST_VARIANTS, max(ways, _MOST_DEMANDS // len(self.demands)))
        return min(most // ways * ways, self.num_tensors)


def share(demands: Sequence[Demand], item_size: int, num_tensors: int, bucket_bytes: int) -> tuple[Demand, ...]:
    """Split demands that replicas should share, and those larger than a bucket; keep the others whole.

    A demand is shared when its replicas would get unequal numbers of whole demands, there are too few of them to even
    that out, and the shares are not small. Every demand must have a holder.
    """
    by_needers = Counter(demand.needers for demand in demands if not demand.near)
    by_holders = Counter(demand.holders for demand in demands if not demand.near)
    shared: list[Demand] = []
    for demand in demands:
        parts = 1
        if not demand.near:
            most = demand.region.numel * item_size // _SMALL_BYTES
            for replicas, alike in (
                (len(demand.needers), by_needers[demand.needers] * num_tensors),
                (len(demand.holders), by_holders[demand.holders] * num_tensors),
            ):
                if alike % replicas and alike < 4 * replicas:
                    parts = max(parts, min(replicas, most))
        shared.extend(
            Demand(region, demand.domain, demand.holders, demand.needers, demand.near)
            for part in _split(demand.region, parts)
            for region in bounded(part, bucket_bytes // item_size)
        )
    return tuple(shared)


def _split(region: Region, parts: int) -> tuple[Region, ...]:
    """At least `parts` pieces where the region has as many elements, along the outermost dims that allow it."""
    if parts <= 1:
        return (region,)
    for dim, extent in enumerate(region.extent):
        if extent >= parts:
            return region.split(dim, parts)
    widest = max(range(len(region.extent)), key=lambda dim: (region.extent[dim], -dim), default=None)
    if widest is None or region.extent[widest] == 1:
        return (region,)
    outer = region.split(widest, parts)
    return tuple(piece for part in outer for piece in _split(part, -(-parts // len(outer))))


def assign(choices: Sequence[Choice]) -> list[tuple[tuple[Move, ...], ...]]:
    """For each choice its variants, each the moves that meet every demand once.

    Tensor number i of a template is meant to use variant i modulo their number. Candidates are taken in order of
    (present load, rank); what leaves no choice is counted first, so that the free ones can make up for it.
    """
    loads = Loads()
    result: list[tuple[tuple[Move, ...], ...]] = [()] * len(choices)
    order = sorted(range(len(choices)), key=lambda index: (choices[index].num_variants > 1, index))
    for index in order:
        choice = choices[index]
        count = choice.num_variants
        base, extra = divmod(choice.num_tensors, count)
        result[index] = tuple(_choose(choice, base + (way < extra), loads) for way in range(count))
    return result


def _choose(choice: Choice, weight: int, loads: Loads) -> tuple[Move, ...]:
    """One variant, used by `weight` tensors: moves by (lag, piece)."""
    sizes = [demand.region.numel * choice.item_size * weight for demand in choice.demands]
    first: list[Move] = []
    forwards: list[Move] = []
    # Large demands first: small ones can then even out what is left.
    for piece in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        demand, nbytes = choice.demands[piece], sizes[piece]
        if demand.near:
            first.extend(_from_near(piece, demand, nbytes, loads))
            continue
        src = min(demand.holders, key=lambda rank: (loads.network_send[rank], rank))
        entry = min(demand.needers, key=lambda rank: (loads.network_recv[rank], rank))
        loads.network_send[src] += nbytes
        loads.network_recv[entry] += nbytes
        loads.fast_send[entry] += nbytes * (len(demand.needers) - 1)
        first.append(Move(piece, src, entry, Link.NETWORK, 0))
        forwards.extend(Move(piece, entry, dst, Link.FAST, 1) for dst in demand.needers if dst != entry)
    return tuple(sorted(first)) + tuple(sorted(forwards))


def _from_near(piece: int, demand: Demand, nbytes: int, loads: Loads) -> list[Move]:
    """Moves of a demand that some rank of the needers' own domain holds: copies at home, fast links elsewhere."""
    moves = []
    for dst in demand.needers:
        if dst in demand.near:
            moves.append(Move(piece, dst, dst, Link.LOCAL, 0))
            continue
        src = min(demand.near, key=lambda rank: (loads.fast_send[rank], rank))
        loads.fast_send[src] += nbytes
        moves.append(Move(piece, src, dst, Link.FAST, 0))
    return moves
