"""The whole path on threads, bit-equal with gather-then-slice, over the shared table of layouts; always two refits."""

from __future__ import annotations

import pytest
from equipment.layout_cases import LAYOUT_CASES, LayoutCase, layout_case
from equipment.refit_worlds import ThreadWorld, mesh_layout, planned_ranks

from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.cli.verify_spec import verify_spec
from nemo_rl_reshard.layout import TensorLayout
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime.explicit import ExplicitTarget
from nemo_rl_reshard.runtime.leftover_plan import Gather

TINY = PlanOptions(bucket_bytes=64, message_bytes=16)
"""Many messages, many steps, and regions that must be cut, from tensors of a few elements."""

DENSE = "model.layers.0.mlp.down_proj.weight"


def table_layout(case: LayoutCase, first: int) -> TensorLayout:
    """The layout of a case on ranks that start at `first`."""
    ranks = [first + rank for rank in case.mesh_ranks]
    return mesh_layout(case.shape, case.mesh, ranks, *case.placements)


def other_side(shape: tuple[int, ...], first: int) -> tuple[TensorLayout, int]:
    """Another layout of the same shape, and its number of ranks: 2 replicas of last dim over 3."""
    return mesh_layout(shape, (2, 3), range(first, first + 6), "R", f"S({len(shape) - 1})"), 6


@pytest.mark.parametrize("domains", ["apart", "together"])
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
def test_every_layout_as_the_trainers(case: LayoutCase, domains: str) -> None:
    """`B01`..`B07`: uneven, empty, strided, replicated and reordered sources; replicas that exchange, or do not."""
    target, num_targets = other_side(case.shape, case.size)
    joined = (tuple(range(case.size, case.size + num_targets)),) if domains == "together" else ()
    ranks = planned_ranks(
        [(DENSE, table_layout(case, 0), "float32")],
        [(DENSE, target, "float32")],
        num_trainers=case.size,
        num_targets=num_targets,
        domains=joined,
        options=TINY,
        in_flight=2,
    )
    world = ThreadWorld(ranks)
    world.refit(1)
    world.refit(2)


@pytest.mark.parametrize("case", LAYOUT_CASES, ids=lambda case: case.name)
def test_every_layout_as_the_engines(case: LayoutCase) -> None:
    source = mesh_layout(case.shape, (3,), range(3), f"S({len(case.shape) - 1})")
    world = ThreadWorld(
        planned_ranks(
            [(DENSE, source, "float32")],
            [(DENSE, table_layout(case, 3), "float32")],
            num_trainers=3,
            num_targets=case.size,
            domains=(tuple(range(3, 3 + case.size)),),
            options=TINY,
        )
    )
    world.refit(1)
    world.refit(2)


@pytest.mark.parametrize("in_flight", [1, 3, 16])
def test_masters_are_cast_once_at_the_sender(in_flight: int) -> None:
    """`B36`, `B37`: bf16 from fp32 masters, beside tensors that keep fp32, widen, or are one byte wide."""
    rows = mesh_layout((10, 6), (2, 3), range(6), "S(0)", "S(1)")
    columns = mesh_layout((10, 6), (3,), range(6, 9), "S(1)")
    bias, bias_needed = mesh_layout((7,), (6,), range(6), "S(0)"), mesh_layout((7,), (3,), range(6, 9), "R")
    source = [("a", rows, "float32"), ("b", bias, "float32"), ("c", bias, "int8"), ("d", bias, "float32")]
    target = [
        ("a", columns, "bfloat16"),
        ("b", bias_needed, "float32"),
        ("c", bias_needed, "int8"),
        ("d", bias_needed, "float64"),
    ]
    world = ThreadWorld(
        planned_ranks(
            source,
            target,
            num_trainers=6,
            num_targets=3,
            domains=((6, 7, 8),),
            options=PlanOptions(256, 40),
            in_flight=in_flight,
        )
    )
    world.refit(1)
    world.refit(2)


def test_rounding_is_to_nearest_even() -> None:
    """`B36`: the measured values, by hand."""
    whole = mesh_layout((3,), (1,), (0,), "R")
    needed = mesh_layout((3,), (1,), (1,), "R")
    for policy in RoutePolicy:
        world = ThreadWorld(
            planned_ranks(
                [("w", whole, "float32")], [("w", needed, "bfloat16")], num_trainers=1, num_targets=1, policy=policy
            )
        )
        ((_, held),) = world.live[0].source.shards["w"]
        held.copy_(held.new_tensor([1.00390625, 1.01171875, -1.00390625]))
        world.outcomes(1)
        ((_, got),) = world.live[1].target.shards["w"]
        assert got.tolist() == [1.0, 1.015625, -1.0]


@pytest.mark.parametrize("gather", list(Gather))
@pytest.mark.parametrize("name", ["rows_empty_rank", "hsdp_2x3", "fsdp_over_columnwise_empty", "stacked_experts_empty"])
def test_gather_and_broadcast_of_everything(name: str, gather: Gather) -> None:
    """`B03`: as the baseline backend; ranks that hold nothing take part in every collective."""
    case = layout_case(name)
    target, num_targets = other_side(case.shape, case.size)
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(7)]
    world = ThreadWorld(
        planned_ranks(
            [(each, table_layout(case, 0), "float32") for each in names],
            [(each, target, "bfloat16") for each in names],
            num_trainers=case.size,
            num_targets=num_targets,
            policy=RoutePolicy.FFN,
            options=PlanOptions(bucket_bytes=512, message_bytes=16),
            gather=gather,
        )
    )
    for version in (1, 2):
        reports = world.refit(version)
        assert all(report["num_messages"] == 0 for report in reports.values())
        assert sum(report["leftover_bytes_received"] for report in reports.values()) > 0


def test_zero_copy_where_nothing_has_to_change() -> None:
    """Row blocks travel from live storage to live storage: no staging at all is allocated."""
    world = ThreadWorld(
        planned_ranks(
            [(DENSE, mesh_layout((12, 4), (4,), range(4), "S(0)"), "float32")],
            [(DENSE, mesh_layout((12, 4), (2,), (4, 5), "S(0)"), "float32")],
            num_trainers=4,
            num_targets=2,
            options=TINY,
        )
    )
    reports = world.refit(1)
    assert all(report["num_zero_copy"] == report["num_messages"] > 0 for report in reports.values())
    assert all(report["peak_extra_bytes"] == 0 for report in reports.values())


def test_each_byte_enters_a_domain_once() -> None:
    """TP4 to TP2 x DP2 with the receivers in one domain: four shards' worth from the trainers, the rest inside."""
    shape, nbytes = (8, 6), 8 * 6 * 4
    world = ThreadWorld(
        planned_ranks(
            [(DENSE, mesh_layout(shape, (4,), range(4), "S(0)"), "float32")],
            [(DENSE, mesh_layout(shape, (2, 2), range(4, 8), "R", "S(1)"), "float32")],
            num_trainers=4,
            num_targets=4,
            domains=((4, 5, 6, 7),),
            options=TINY,
        )
    )
    reports = world.refit(1)
    received = {
        link: sum(report["bytes_received"][link] for report in reports.values()) for link in ("network", "fast")
    }
    assert received == {"network": nbytes, "fast": nbytes}


@pytest.mark.parametrize("route", ["ffn", "all"])
def test_ranks_that_are_on_both_sides(route: str) -> None:
    """Colocated: local copies beside messages, a root that receives its own broadcast, a trainer that is no engine."""
    sides = {
        "source": {"ranks": [4, 1, 2], "placements": ["S(0)"]},
        "target": {"ranks": [2, 7, 1], "placements": ["S(1)"]},
    }
    norm = {"source": sides["source"], "target": {"ranks": [2, 7, 1], "placements": ["R"]}}
    spec = parse_spec(
        {
            "colocated": True,
            "route": route,
            "tensors": [
                {"name": DENSE, "shape": [10, 9], "dtype": "float32", **sides},
                {"name": "model.norm.weight", "shape": [2], "dtype": "bfloat16", **norm},
            ],
            "topology": {"domains": [[4, 1], [2, 7]]},
            "bucket_bytes": 128,
            "message_bytes": 32,
        }
    )
    result = verify_spec(spec)
    assert result.passed, result.differences
    assert result.num_elements == 2 * (90 + 3 * 2)


def test_leftovers_among_the_very_same_ranks() -> None:
    """Gathering and sending share one group, so every rank must start both in one order; several batches."""
    side = {"ranks": [0, 1, 2], "placements": ["S(0)"]}
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(5)]
    tensors = [{"name": name, "shape": [7], "dtype": "float32", "source": side, "target": side} for name in names]
    spec = parse_spec({"colocated": True, "tensors": tensors, "bucket_bytes": 128})
    result = verify_spec(spec)
    assert result.passed, result.differences


@pytest.mark.parametrize("bucket_bytes", [16, 32, 48, 64])
def test_a_colocated_rank_forwards_beside_what_it_holds(bucket_bytes: int) -> None:
    """In one step rank 2 forwards a tensor of rank 0 and sends one of its own to rank 3: both share a message."""
    held = {"here": {"ranks": [2], "placements": ["R"]}, "there": {"ranks": [0], "placements": ["R"]}}
    tensors = [
        {
            "name": f"model.layers.{layer}.mlp.up_proj.weight",
            "shape": [4],
            "dtype": "float32",
            "source": held[place],
            "target": {"ranks": [2, 3], "placements": ["R"]},
        }
        for layer, place in enumerate(["there", "there", "here", "here", "there", "here"])
    ]
    result = verify_spec(
        parse_spec(
            {
                "colocated": True,
                "route": "all",
                "tensors": tensors,
                "topology": {"domains": [[2, 3]]},
                "bucket_bytes": bucket_bytes,
            }
        )
    )
    assert result.passed, result.differences


def test_verify_reports_every_element_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that negates what it gets: the digests agree, the elements do not, and all of them are named."""
    monkeypatch.setattr(
        ExplicitTarget,
        "load",
        lambda target, named: [
            (target.loaded.append(name), target.shards[name][0][1].copy_(-whole)) for name, whole in named
        ],
    )
    side = {"source": {"ranks": [0], "placements": ["R"]}, "target": {"ranks": [1], "placements": ["R"]}}
    spec = parse_spec({"tensors": [{"name": "model.norm.weight", "shape": [3], "dtype": "float32", **side}]})
    result = verify_spec(spec)
    assert not result.passed
    assert result.num_differences == len(result.differences) == 6
    assert result.differences[2].startswith("model.norm.weight: rank 1 has ")
    assert " at (2,), the trainers hold " in result.differences[2]
