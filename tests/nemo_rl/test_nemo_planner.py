"""Layouts in NeMo RL's words, for the benchmark that times its planner: they mean the same, and move the same bytes."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from equipment.model_specs import DENSE, EXPERTS, model_spec

from nemo_rl_reshard.cli.refit_spec import RefitSpec
from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import gaps, overlaps
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.planner import make_plan

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from peer_planner import PeerPlanner, our_traffic

EP4 = {"backend": "megatron", "world": 4, "ep": 4}
STAGES_EP2 = {"backend": "megatron", "world": 6, "pp": 3, "ep": 2}
TP2 = {"backend": "megatron", "world": 4, "tp": 2}
ENGINES_TP2 = {"backend": "vllm", "world": 4, "tp": 2, "dp": 2}
ENGINES_EP2 = {**ENGINES_TP2, "ep": 2}
ONE_ENGINE = {"backend": "vllm", "world": 4, "tp": 4}
THREE_REPLICAS = {"backend": "vllm", "world": 6, "tp": 2, "dp": 3}
CASES = {
    "experts to slices of experts": (EXPERTS, EP4, ENGINES_TP2),
    "stages and experts to slices": (EXPERTS, STAGES_EP2, ONE_ENGINE),
    "experts to experts": (EXPERTS, STAGES_EP2, ENGINES_EP2),
    "dense": (DENSE, TP2, ENGINES_TP2),
    "replicas that no first dim divides evenly": (EXPERTS, EP4, THREE_REPLICAS),
}


@pytest.fixture(scope="module")
def planner(checkout: Path) -> PeerPlanner:
    return PeerPlanner(checkout)


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RefitSpec, dict[str, Any]]:
    config, source, target = request.param
    plain = model_spec(tmp_path, config, source=source, target=target, route="all")
    return parse_spec(plain, folder=tmp_path), plain


def region(box: tuple[tuple[int, int], ...]) -> Region:
    return Region(tuple(start for start, _ in box), tuple(stop - start for start, stop in box))


def test_all_feed_forward_tensors_are_translated(planner: PeerPlanner, case: tuple[RefitSpec, dict[str, Any]]) -> None:
    spec, plain = case
    made = planner.translate(spec, plain)
    assert made.names == {name for name in spec.target.specs if name.endswith("_proj.weight") and ".mlp." in name}
    assert set(made.left_out) == {"no feed-forward projection"}


def test_its_messages_bring_every_shard_once(planner: PeerPlanner, case: tuple[RefitSpec, dict[str, Any]]) -> None:
    spec, plain = case
    made = planner.translate(spec, plain)
    for entry in made.entries:
        transfers, groups = planner.transfers(entry)
        assert sorted(number for _, members, _ in groups for number in members) == sorted(planner.regions(entry, "dst"))
        for shard, members, _ in groups:
            arriving = [region(box) for _, receiver, box in transfers if receiver in members]
            assert not list(overlaps(arriving))
            assert not list(gaps(region(shard), arriving))
        held = planner.regions(entry, "src")
        assert all(region(held[sender]).contains(region(box)) for sender, _, box in transfers)


def test_both_bring_a_rank_the_same_bytes(planner: PeerPlanner, case: tuple[RefitSpec, dict[str, Any]]) -> None:
    spec, plain = case
    made = planner.translate(spec, plain)
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    sent = received = 0
    for rank in spec.target.ranks:
        _, theirs = planner.measure(made, rank)
        needed = sum(
            prod(part.extent) * spec.target.specs[name].item_size
            for name in made.names
            for part in spec.target.layouts[name].regions_of(rank)
        )
        brought = our_traffic(lower(plan, rank), made.names)["received_bytes"]
        assert theirs.received_bytes + theirs.exchanged_bytes == brought == needed
        received += theirs.received_bytes
    for rank in spec.source.ranks:
        sent += planner.measure(made, rank)[1].sent_bytes
    assert sent == received > 0


def test_a_tensor_that_lies_otherwise_is_left_out_alone(planner: PeerPlanner, tmp_path: Path) -> None:
    plain = model_spec(tmp_path, DENSE, source=TP2, target=ENGINES_TP2, route="all")
    spec = parse_spec(plain, folder=tmp_path)
    name = next(name for name in spec.target.specs if name.endswith("mlp.down_proj.weight"))
    known = spec.target.layouts[name]
    turned = TensorLayout(
        known.shape,
        tuple((rank, held) for (rank, _), (_, held) in zip(known.held, reversed(known.held), strict=True)),
    )
    assert turned != known
    moved = replace(spec, target=replace(spec.target, layouts={**spec.target.layouts, name: turned}))
    made = planner.translate(moved, plain)
    assert made.left_out["layouts that its meshes do not describe"] == [name]
    assert made.names == planner.translate(spec, plain).names - {name}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"source": {"backend": "fsdp2", "world": 4}}, "fsdp2"),
        ({"source": {**EP4, "ep": 2, "etp": 2}}, "etp"),
        ({"target": {"backend": "vllm", "world": 4, "tp": 2, "pp": 2}}, "pipeline"),
    ],
    ids=["fsdp2", "etp", "pp"],
)
def test_a_side_that_nemo_rl_refuses_is_refused(
    planner: PeerPlanner, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    plain = model_spec(tmp_path, EXPERTS, **{"source": EP4, "target": ENGINES_TP2, **changed})
    with pytest.raises(ValueError, match=said):
        planner.translate(parse_spec(plain, folder=tmp_path), plain)
