"""Pieces: how demands are cut, and which wave each piece joins."""

from collections import Counter, defaultdict

import pytest
from equipment.declaring import layout, refit, rows

from nemo_rl_reshard.layout.tiling import volume
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.overlay import overlay
from nemo_rl_reshard.plan.pieces import share, waves_of
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.topology import Link, Topology

MIB = 1 << 20


def test_small_demands_stay_whole_and_large_ones_are_cut_to_the_bucket():
    given, wanted = rows((64, 4), {0: [(0, 64)]}), rows((64, 4), {1: [(0, 64)], 2: [(0, 64)]})
    demands = overlay(given, wanted, {0: 0, 1: 1, 2: 1})
    assert share(demands, 4, 1 << 20) == demands
    assert [d.region.extent for d in share(demands, 4, 1024)] == [(16, 4)] * 4, "waves of a quarter of a bucket"


@pytest.mark.parametrize("num_domains", [1, 2, 3])
@pytest.mark.parametrize("num_needers", [1, 3, 16])
@pytest.mark.parametrize("bucket_bytes", [4 * MIB, 64 * MIB])
def test_pieces_cover_every_demand_once_within_their_bounds(num_domains, num_needers, bucket_bytes):
    shape = (1536, 1000)
    held = layout(shape, (2,), "S(0)", (0, 1))
    ranks = range(2, 2 + num_domains * num_needers)
    wanted = layout(shape, (num_domains * num_needers,), "R", ranks)
    domain_of = {0: 100, 1: 101} | {rank: (rank - 2) // num_needers for rank in ranks}
    demands = overlay(held, wanted, domain_of)
    shared = share(demands, 4, bucket_bytes)
    parts = defaultdict(list)
    for demand in shared:
        parts[demand.domain, demand.holders, demand.needers].append(demand.region)
        assert demand.region.numel * 4 <= bucket_bytes // 4
    for demand in demands:
        regions = parts[demand.domain, demand.holders, demand.needers]
        assert sum(region.numel for region in regions) == volume(regions) == demand.region.numel
    most = max(bucket_bytes // (8 * num_domains), 256 << 10) if num_domains > 1 else bucket_bytes // 4
    assert max(demand.region.numel for demand in shared) * 4 <= most


def test_many_domains_do_not_make_pieces_ever_smaller():
    shape = (4096, 1024)
    wanted = layout(shape, (16,), "R", range(1, 17))
    demands = overlay(layout(shape, (1,), "R", (0,)), wanted, {rank: rank for rank in range(17)})
    assert {demand.region.numel * 4 for demand in share(demands, 4, 64 * MIB)} == {MIB}


@pytest.mark.parametrize(("num_pieces", "num_waves"), [(1, 1), (3, 2), (8, 3), (5, 8)])
def test_waves_are_even_for_needers_and_then_for_holders(num_pieces, num_waves):
    ways = [(holder, needer) for holder in "ab" for needer in "xyz" for _ in range(num_pieces)]
    waves = waves_of(ways, [1] * len(ways), num_waves)
    assert set(waves) <= set(range(num_waves))
    for side, members in ((1, "xyz"), (0, "ab")):
        for member in members:
            found = Counter(wave for way, wave in zip(ways, waves, strict=True) if way[side] == member)
            counts = [found[wave] for wave in range(num_waves)]
            assert max(counts) - min(counts) <= (1 if side else 2)


def test_pieces_with_ranks_of_their_own_spread_over_the_waves():
    ways = [(place, place) for place in range(12)]
    assert Counter(waves_of(ways, [1] * 12, 4)) == dict.fromkeys(range(4), 3)


def test_in_a_large_domain_every_rank_passes_on_its_part_of_every_step():
    """All 16 ranks of a domain need all: who receives a piece first sends it fifteen times."""
    shape, ranks = (8192, 8192), range(2, 18)
    spec = TensorSpec("lm_head.weight", shape, "bfloat16")
    topology = Topology(domains=((0, 1), tuple(ranks)))
    options = PlanOptions(bucket_bytes=32 * MIB)
    found = refit([(spec, layout(shape, (2,), "S(0)", (0, 1)), layout(shape, (16,), "R", ranks))], (0, 1), ranks,
                  topology, options)  # fmt: skip
    passed: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for transfer in found.plan.transfers():
        if transfer.link is Link.FAST:
            passed[transfer.step][transfer.src] += transfer.region.numel * 2
    assert len(passed) > 3
    total = sum(passed.values(), Counter())
    assert max(total.values()) == min(total[rank] for rank in ranks)
    busiest = sum(max(step.values()) for step in passed.values())
    assert busiest <= 1.1 * max(total.values())
