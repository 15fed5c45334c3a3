"""Reading refit specs: every form that spec/plan.md allows, and what it means."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl_reshard.cli.spec import RefitSpec, parse_spec
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.routing import RouteKind


def read(source: dict[str, Any], target: dict[str, Any], shape: list[int], **top: Any) -> RefitSpec:
    tensor = {"name": "w", "shape": shape, "dtype": "float32", "source": source, "target": target}
    return parse_spec({"tensors": [tensor], "route": "all", **top})


def rows(spec: RefitSpec, rank: int, side: str = "source") -> list[int]:
    """Which rows of a [n, 1] tensor a rank of one side has."""
    regions = getattr(spec, side).layouts["w"].regions_of(rank)
    return [row for region in regions for row in range(region.offset[0], region.stop[0])]


WHOLE = {"ranks": [9], "placements": ["R"]}


def test_strided_shard_over_shard_reads_as_torch_places_it() -> None:
    """B01: read left to right, ranks 1 and 2 would swap."""
    spec = read({"ranks": [[0, 1], [2, 3]], "placements": ["SS(0,2)", "S(0)"]}, WHOLE, [10, 1])
    assert [rows(spec, rank) for rank in range(4)] == [[0, 1, 2], [5, 6, 7], [3, 4], [8, 9]]


def test_uneven_strided_shard_leaves_one_rank_empty() -> None:
    """B02: rank 5 has no row, and is of the side all the same."""
    spec = read({"ranks": [[0, 1, 2], [3, 4, 5]], "placements": ["SS(0,3)", "S(0)"]}, WHOLE, [7, 1])
    assert [rows(spec, rank) for rank in range(6)] == [[0, 1], [3, 4], [6], [2], [5], []]
    assert spec.source.ranks == (0, 1, 2, 3, 4, 5)


def test_strided_shard_without_a_later_axis_owns_several_pieces() -> None:
    spec = read({"ranks": [0, 1], "placements": ["SS(0,2)"]}, WHOLE, [8, 1])
    assert [rows(spec, rank) for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_ranks_come_in_any_order_with_gaps_and_three_axes() -> None:
    grid = [[[40, 7], [3, 100]], [[2, 5], [6, 1]]]
    spec = read({"ranks": grid, "placements": ["R", "S(0)", "S(1)"]}, WHOLE, [2, 2])
    assert spec.source.layouts["w"].regions_of(40) == (Region((0, 0), (1, 1)),)
    assert spec.source.layouts["w"].regions_of(1) == (Region((1, 1), (1, 1)),)
    assert spec.source.ranks == (1, 2, 3, 5, 6, 7, 40, 100)


def test_shards_form_takes_several_shards_of_one_rank() -> None:
    shards = [
        {"rank": 0, "offset": [0, 0], "extent": [2, 3]},
        {"rank": 1, "offset": [2, 0], "extent": [1, 3]},
        {"rank": 0, "offset": [3, 0], "extent": [2, 3]},
    ]
    spec = read({"shards": shards}, WHOLE, [5, 3])
    assert (rows(spec, 0), rows(spec, 1)) == ([0, 1, 3, 4], [2])


def test_target_may_need_a_part_only() -> None:
    part = {"shards": [{"rank": 9, "offset": [1, 0], "extent": [2, 1]}]}
    held = {"shards": [{"rank": 0, "offset": [1, 0], "extent": [3, 1]}]}
    assert rows(read(held, part, [5, 1]), 9, "target") == [1, 2]


def test_scalar_and_empty_tensors_are_tensors() -> None:
    replicated = {"ranks": [0, 1], "placements": ["R"]}
    assert read(replicated, WHOLE, []).source.specs["w"].numel == 1
    assert read(replicated, WHOLE, [0, 4]).source.specs["w"].nbytes == 0


def test_equal_layouts_are_one_object_so_that_many_tensors_stay_small() -> None:
    side = {"ranks": [0, 1], "placements": ["S(0)"]}
    tensors = [
        {"name": f"w{index}", "shape": [4, 4], "dtype": "bfloat16", "source": side, "target": WHOLE}
        for index in range(3)
    ]
    layouts = parse_spec({"tensors": tensors, "route": "all"}).source.layouts
    assert len({id(layout) for layout in layouts.values()}) == 1


def test_colocated_lets_a_rank_be_on_both_sides() -> None:
    side = {"ranks": [0, 1], "placements": ["S(0)"]}
    spec = read(side, {"ranks": [1, 0], "placements": ["S(0)"]}, [4, 1], colocated=True)
    assert spec.source.ranks == spec.target.ranks == (0, 1)


def test_route_is_ffn_unless_said_otherwise() -> None:
    side = {"ranks": [0], "placements": ["R"]}
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight")
    tensors = [{"name": name, "shape": [2], "dtype": "float32", "source": side, "target": WHOLE} for name in names]
    routes = parse_spec({"tensors": tensors}).routes
    assert [routes[name].kind for name in names] == [RouteKind.DIRECT, RouteKind.LEFTOVER]
    assert routes[names[1]].reason


def test_rates_are_in_units_of_1e9_bytes_and_override_a_preset() -> None:
    topology = {"preset": "dgx-h100", "network_gb_per_s": 25, "wire_efficiency": 0.5}
    found = read({"ranks": [0, 1], "placements": ["S(0)"]}, WHOLE, [2, 1], topology=topology).topology
    assert (found.network_bytes_per_s, found.fast_bytes_per_s, found.wire_efficiency) == (25e9, 450e9, 0.5)
    assert found.domains == ((0, 1), (9,))


@pytest.mark.parametrize(("preset", "size"), [("dgx-h100", 8), ("gb200-nvl72", 64)])
def test_presets_cut_each_side_into_domains_of_their_size(preset: str, size: int) -> None:
    count = size + 3
    source = {"ranks": list(range(count)), "placements": ["S(0)"]}
    target = {"ranks": list(range(count, 2 * count)), "placements": ["S(0)"]}
    domains = read(source, target, [count, 1], topology={"preset": preset}).topology.domains
    assert [len(domain) for domain in domains] == [size, 3, size, 3]


def test_the_size_of_domains_and_who_shares_a_nic_can_be_given() -> None:
    source = {"ranks": [0, 1, 2, 3], "placements": ["S(0)"]}
    target = {"ranks": [4, 5, 6], "placements": ["S(0)"]}
    sized = read(
        source, target, [12], topology={"preset": "gb200-nvl72", "domain_size": 2, "ranks_per_nic": 2}
    ).topology
    assert (sized.domains, sized.ranks_per_nic) == (((0, 1), (2, 3), (4, 5), (6,)), 2)
    assert sized.fast_bytes_per_s == 900e9
    assert read(source, target, [12], topology={"domain_size": 3}).topology.domains == ((0, 1, 2), (3,), (4, 5, 6))
    assert read(source, target, [12], topology={"preset": "one-host"}).topology.domains == (tuple(range(7)),)


def test_sizes_of_buckets_and_messages_can_be_given() -> None:
    options = read({"ranks": [0], "placements": ["R"]}, WHOLE, [2], bucket_bytes=1024, message_bytes=64).options
    assert (options.bucket_bytes, options.message_bytes) == (1024, 64)
