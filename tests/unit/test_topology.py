"""Topologies and machine presets."""

import pytest

from nemo_rl_reshard.errors import LayoutError
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.routing import Route, RouteKind
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.statistics import statistics
from nemo_rl_reshard.topology import MACHINES, Topology, from_preset


def test_ranks_without_a_domain_are_domains_of_their_own():
    topology = Topology(domains=((5, 1), (2,)))
    assert topology.domains_with([0, 1, 2, 5, 9]) == {5: 0, 1: 0, 2: 1, 0: 2, 9: 3}
    assert topology.domain_of() == {5: 0, 1: 0, 2: 1}


def test_a_rank_in_two_domains_is_refused():
    with pytest.raises(LayoutError, match=r"\[1\] in more than one domain"):
        Topology(domains=((0, 1), (1, 2)))


def test_a_preset_groups_each_side_in_rank_order():
    topology = from_preset("dgx-h100", [range(10), (12, 11)])
    assert topology.domains == (tuple(range(8)), (8, 9), (11, 12))
    assert topology.network_bytes_per_s == 50e9
    assert topology.fast_bytes_per_s == 450e9


def test_a_preset_counts_colocated_ranks_once():
    assert from_preset("dgx-h100", [(0, 1), (0, 1)]).domains == ((0, 1),)


def test_unknown_presets_are_refused_with_the_known_ones():
    with pytest.raises(LayoutError, match="known are " + ", ".join(MACHINES)):
        from_preset("dgx-h1000", [])


def test_jobs_on_nvl72_use_64_ranks_of_a_domain_unless_told_otherwise():
    ranks = range(128)
    assert [len(domain) for domain in from_preset("gb200-nvl72", [ranks]).domains] == [64, 64]
    assert [len(domain) for domain in from_preset("gb200-nvl72", [ranks], domain_size=72).domains] == [72, 56]
    assert (
        from_preset("gb300-nvl72", [ranks]).network_bytes_per_s
        == 2 * from_preset("gb200-nvl72", [ranks]).network_bytes_per_s
    )


def test_a_domain_can_be_smaller_than_the_machine_but_not_larger():
    assert from_preset("dgx-h100", [range(8)], domain_size=4).domains == ((0, 1, 2, 3), (4, 5, 6, 7))
    with pytest.raises(LayoutError, match="a domain of gb200-nvl72 has 72 ranks; 73 are too many"):
        from_preset("gb200-nvl72", [range(80)], domain_size=73)
    with pytest.raises(LayoutError, match="a domain of 0 ranks"):
        from_preset("one-host", [range(4)], domain_size=0)


def test_one_host_is_one_domain_of_both_sides():
    assert from_preset("one-host", [(4, 0, 1), (3, 2)]).domains == ((0, 1, 2, 3, 4),)
    assert from_preset("one-host", [(0, 1), (2, 3)], domain_size=2).domains == ((0, 1), (2, 3))


def test_a_nic_is_shared_in_rank_order_inside_a_domain_only():
    topology = Topology(domains=((5, 1, 3), (2, 0)), ranks_per_nic=2)
    assert topology.nics_with([7, 9]) == {1: 1, 3: 1, 5: 5, 0: 0, 2: 0, 7: 7, 9: 9}
    assert Topology(domains=((5, 1, 3),)).nics_with([0]) == {1: 1, 3: 3, 5: 5, 0: 0}
    with pytest.raises(LayoutError, match="0 ranks share a NIC"):
        Topology(ranks_per_nic=0)


def floor(source: dict[int, list[int]], target: dict[int, list[int]], topology: Topology) -> tuple[float, str]:
    """The floor of one bfloat16 tensor of 8 elements, and what sets it; sides map a rank to the range it has."""
    sides = [
        TensorLayout.from_regions((8,), {rank: [Region((a,), (b - a,))] for rank, (a, b) in side.items()})
        for side in (source, target)
    ]
    spec = {"w": TensorSpec("w", (8,), "bfloat16")}
    trainer, engine = (
        Catalog(side, spec, {"w": layout}, {}, layout.ranks)
        for side, layout in zip((Side.TRAINER, Side.INFERENCE), sides, strict=True)
    )
    routes = {"w": Route(RouteKind.DIRECT, "a test")}
    plan = make_plan(trainer, engine, routes, topology, PlanOptions())
    predicted = statistics(plan, trainer, engine, topology)["predicted"]
    assert predicted["seconds"] >= predicted["floor_seconds"] / topology.wire_efficiency
    return predicted["floor_seconds"], predicted["floor_bottleneck"]


def test_shared_nics_raise_the_floor_of_domains_that_fill_them():
    """Two ranks that bring 8 bytes each have one NIC of 4 bytes/s between them, or one each."""
    source = {0: [0, 8], 1: [0, 8]}
    target = {2: [0, 4], 3: [4, 8]}
    rates = {"network_bytes_per_s": 4.0, "fast_bytes_per_s": 1e9}
    assert floor(source, target, Topology(((2, 3),), **rates)) == (2, "inbound of domain 0")
    assert floor(source, target, Topology(((2, 3),), **rates, ranks_per_nic=2)) == (4, "inbound of domain 0")


def test_shared_nics_raise_the_floor_of_only_copies_and_a_lone_rank_has_the_whole_nic():
    rates = {"network_bytes_per_s": 4.0, "fast_bytes_per_s": 1e9}
    shared = Topology(((0, 1), (2, 3, 4, 5)), **rates, ranks_per_nic=2)
    target = {rank: [2 * rank - 4, 2 * rank - 2] for rank in (2, 3, 4, 5)}
    assert floor({0: [0, 4], 1: [4, 8]}, target, shared) == (4, "only copies at the NIC of rank 0")
    # Rank 1 is idle: 16 bytes leave rank 0 in 4 s, not in the 8 s that half a NIC would take.
    assert floor({0: [0, 8]}, target, shared)[0] == 4
    # What rank 1 holds too may leave by it, which changes nothing at their common NIC: 8 bytes have one way only.
    assert floor({0: [0, 8], 1: [0, 4]}, target, shared)[0] == 2
