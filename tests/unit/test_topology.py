"""Topologies and machine presets."""

import pytest

from nemo_rl_reshard.errors import LayoutError
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
