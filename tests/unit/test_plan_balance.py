"""Who sends what: shares among replicas, free choices that make up for forced ones, the optimum to compare with."""

from collections import Counter
from fractions import Fraction

import pytest
from equipment.declaring import layout, refit, rows

from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.balance import Choice, assign
from nemo_rl_reshard.plan.optimum import least_peak
from nemo_rl_reshard.plan.overlay import overlay
from nemo_rl_reshard.plan.relay import Outlook
from nemo_rl_reshard.simulate.statistics import statistics
from nemo_rl_reshard.topology import Link, Topology


def send_bytes(found):
    loads = Counter()
    for transfer in found.plan.transfers():
        if transfer.link is Link.NETWORK:
            loads[transfer.src] += transfer.region.numel * 4
    return loads


def test_overlay_names_holders_needers_and_near_holders():
    given = rows((4, 2), {0: [(0, 4)], 1: [(0, 2)]})
    wanted = rows((4, 2), {2: [(0, 4)], 3: [(1, 2)]})
    demands = overlay(given, wanted, {0: 0, 1: 1, 2: 1, 3: 2})
    told = [(d.region.offset[0], d.region.extent[0], d.domain, d.holders, d.needers, d.near) for d in demands]
    assert told == [
        (0, 2, 1, (0, 1), (2,), (1,)),
        (2, 2, 1, (0,), (2,), ()),
        (1, 1, 2, (0, 1), (3,), ()),
        (2, 1, 2, (0,), (3,), ()),
    ]


def test_free_choices_make_up_for_forced_ones():
    only_0 = rows((4, 2), {0: [(0, 4)]})
    either = rows((4, 2), {0: [(0, 4)], 1: [(0, 4)]})
    wanted = rows((4, 2), {2: [(0, 4)]})
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (4, 2), "float32") for i in range(6)]
    # The free tensors come first in the model, and must still leave rank 0 to the forced ones.
    tensors = [(spec, either if i < 4 else only_0, wanted) for i, spec in enumerate(specs)]
    assert send_bytes(refit(tensors, (0, 1), (2,))) == {0: 96, 1: 96}


def test_many_tensors_share_a_few_variants_and_balance_exactly():
    given = layout((4, 4), (3, 2), "R S(0)", range(6))
    wanted = layout((4, 4), (2, 2), "R S(1)", range(6, 10))
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (4, 4), "float32") for i in range(60)]
    found = refit([(s, given, wanted) for s in specs], range(6), range(6, 10), Topology(domains=((6, 7, 8, 9),)))
    assert len(found.plan.templates[0].variants) <= 24
    assert set(send_bytes(found).values()) == {60 * 64 // 6}


def test_large_demands_choose_first_so_that_small_ones_even_out():
    either = rows((4, 2), {0: [(0, 4)], 1: [(0, 4)]})
    wanted = rows((4, 2), {2: [(0, 1)], 3: [(1, 1)], 4: [(2, 2)]})
    found = refit(
        [(TensorSpec("model.layers.0.mlp.up_proj.weight", (4, 2), "float32"), either, wanted)], (0, 1), (2, 3, 4)
    )
    assert send_bytes(found) == {0: 16, 1: 16}


def test_holders_inside_the_domain_take_turns_on_the_fast_links():
    given, wanted = rows((4, 2), {0: [(0, 4)], 1: [(0, 4)]}), rows((4, 2), {2: [(0, 4)]})
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (4, 2), "float32") for i in range(6)]
    found = refit([(spec, given, wanted) for spec in specs], (0, 1), (2,), Topology(domains=((0, 1, 2),)))
    told = statistics(found.plan, found.source, found.target, found.topology)
    assert [row["fast_send"] for row in told["per_rank"]] == [96, 96, 0]


def test_assignment_does_not_depend_on_how_ranks_are_listed():
    given, wanted = rows((4, 2), {0: [(0, 4)], 1: [(0, 4)]}), rows((4, 2), {2: [(0, 4)], 3: [(0, 4)]})
    demands = overlay(given, wanted, {0: 0, 1: 1, 2: 2, 3: 2})
    again = overlay(given, wanted, {3: 2, 2: 2, 1: 1, 0: 0})
    crews = (((0, 1, 2, 3), 5),)
    outlook = Outlook({}, {})
    one, two = (assign([Choice(each, 4, 2, crews)], 1 << 20, outlook) for each in (demands, again))
    assert one == two


@pytest.mark.parametrize(
    ("loads", "peak"),
    [
        ({}, 0),
        ({(0, 1): 10}, 5),
        ({(0,): 10, (0, 1): 10}, 10),
        ({(0,): 12, (0, 1): 6, (1, 2): 3}, 12),
        ({(0, 1): 9, (1, 2): 9, (0, 2): 9}, 9),
        ({(0, 1): 20, (1,): 10, (2, 3): 4}, 15),
        ({(0, 1, 2): 10, (3,): 1}, Fraction(10, 3)),
        ({(0, 1): 10, (1, 2): 10, (2, 3): 10, (3,): 10}, 10),
    ],
)
def test_least_peak_of_known_loads(loads, peak):
    assert least_peak(loads) == peak


def test_least_peak_equals_the_largest_crowd_over_its_senders():
    from itertools import combinations
    from random import Random

    random = Random(3)
    for _ in range(60):
        loads = {}
        for _ in range(random.randint(1, 6)):
            loads[tuple(sorted(random.sample(range(5), random.randint(1, 3))))] = random.randint(1, 50)
        crowds = [
            Fraction(sum(loads[key] for key in crowd), len({rank for key in crowd for rank in key}))
            for size in range(1, len(loads) + 1)
            for crowd in combinations(loads, size)
        ]
        assert least_peak(loads) == max(crowds)


def test_hsdp_plan_is_at_the_optimum():
    given = layout((12, 4), (2, 3), "R S(0)", range(6))
    wanted = layout((12, 4), (2,), "S(1)", (6, 7))
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (12, 4), "float32") for i in range(8)]
    found = refit([(spec, given, wanted) for spec in specs], range(6), (6, 7))
    told = statistics(found.plan, found.source, found.target, found.topology)
    assert told["balance"]["max_network_send_over_optimum"] == 1.0
    assert told["balance"]["max_network_send_over_mean"] == 1.0
