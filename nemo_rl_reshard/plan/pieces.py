"""Pieces: how large a part of a tensor travels at once, and in which of the tensor's waves each part does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import gcd, lcm

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import bounded
from nemo_rl_reshard.plan.overlay import Demand

WAVES = 4
"""Of a bucket: what a rank sends, or receives, of one tensor in one step is about that part."""
_DOSES = 8
"""Of a bucket: what one piece brings to its domains, eight at the most, together. So trainers send in small doses, and
the pieces of one tensor reach a domain at different places of their chains."""
_MOST_DOMAINS = 8
_FEW_NEEDERS = 8
"""Of one domain. Fast links are some nine times as fast as a NIC (450 and 50 GB/s on an H100), so whoever received a
piece passes it on to so many before the next one is there."""
_SMALL_BYTES = 256 << 10
"""A piece below this gains nothing from being shared."""
_MOST_PIECES = 1024
"""Of a tensor that many ranks of a domain need, by being cut for them."""


def share(demands: Sequence[Demand], item_size: int, bucket_bytes: int) -> tuple[Demand, ...]:
    """Split large demands so that replicas, and ranks of a domain, can share them; keep the others whole.

    So every replica sends, and every rank of a domain receives and passes on, its part of each large tensor, whatever
    other tensors there are, and of each wave of it. No piece brings more than an eighth of a bucket to all domains that
    need it, or is larger than a quarter. Every demand must have a holder.
    """
    far = [demand for demand in demands if not demand.near]
    by_needers = Counter((demand.needers, demand.region.numel) for demand in far)
    by_holders = Counter((demand.holders, demand.region.numel) for demand in far)
    wanted: Counter[tuple[int, ...]] = Counter()
    for demand in far:
        wanted[demand.needers] += demand.region.numel * item_size
    num_domains = max(Counter(demand.region for demand in far).values(), default=1)
    small = _SMALL_BYTES // item_size
    quarter = max(1, bucket_bytes // (WAVES * item_size))
    most = quarter
    if num_domains > 1:
        most = min(quarter, max(small, bucket_bytes // (_DOSES * min(num_domains, _MOST_DOMAINS) * item_size)))
    shared: list[Demand] = []
    for demand in demands:
        parts = 1
        if not demand.near:
            parts = lcm(
                _missing(len(demand.needers), by_needers[demand.needers, demand.region.numel]),
                _missing(len(demand.holders), by_holders[demand.holders, demand.region.numel]),
            )
            parts *= _rounds(demand, wanted[demand.needers], item_size, bucket_bytes, parts)
            parts = min(parts, demand.region.numel // small)
        shared.extend(
            Demand(region, demand.domain, demand.holders, demand.needers, demand.near)
            for part in _split(demand.region, parts)
            for region in bounded(part, most)
        )
    return tuple(shared)


def _missing(replicas: int, alike: int) -> int:
    """Into how many parts each of `alike` demands is cut, for all together to be a multiple of `replicas`."""
    return replicas // gcd(replicas, alike)


def _rounds(demand: Demand, whole_bytes: int, item_size: int, bucket_bytes: int, parts: int) -> int:
    """How many times the `parts` of a demand are wanted, of `whole_bytes` that its needers want of the tensor.

    Who receives a region first passes it on to the other needers. They are even in that in every wave if each of them
    is first for a piece of each wave.
    """
    if len(demand.needers) <= _FEW_NEEDERS:
        return 1
    num_waves = -(-whole_bytes * WAVES // bucket_bytes)
    num_pieces = min(_MOST_PIECES, num_waves * len(demand.needers))
    own = demand.region.numel * item_size * num_pieces // whole_bytes
    return max(1, (2 * own + parts) // (2 * parts))


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


def waves_of(ways: Sequence[tuple[Hashable, Hashable]], sizes: Sequence[int], num_waves: int) -> tuple[int, ...]:
    """The wave, from 0, of every piece. `ways` says who holds and who needs each, `sizes` how large it is.

    Each piece joins the wave that brings its needers least so far, of such the one that asks least of its holders.
    """
    needed: Counter[tuple[Hashable, int]] = Counter()
    held: Counter[tuple[Hashable, int]] = Counter()
    filled = [0] * num_waves
    waves = []
    for (holders, needers), size in zip(ways, sizes, strict=True):
        found = min(range(num_waves), key=lambda wave: (needed[needers, wave], held[holders, wave], filled[wave], wave))
        needed[needers, found] += size
        held[holders, found] += size
        filled[found] += size
        waves.append(found)
    return tuple(waves)
