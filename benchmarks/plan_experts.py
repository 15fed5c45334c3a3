"""Planning time of 18,432 expert tensors (128 experts x 48 layers x 3) from 16 to 16 ranks, from manifests to a plan.

    python benchmarks/plan_experts.py [--json OUT]

Three pairs of layouts. Prints wall seconds of each pass; "together" is what a first refit adds to declaring. A later
refit makes no plan.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemo_rl_reshard.layout import Mesh, Region, TensorLayout, parse_placement
from nemo_rl_reshard.params.catalog import merge
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.params.shard import LocalShard, StorageView
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.topology import Topology

NUM_LAYERS, NUM_EXPERTS, HIDDEN, INNER = 48, 128, 2048, 768
SIDE = 16


def expert_tensors() -> Iterator[tuple[TensorSpec, int, bool]]:
    """(tensor, its expert, whether the engine cuts its rows rather than its columns)."""
    for depth in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = (HIDDEN, INNER) if part == "down_proj" else (INNER, HIDDEN)
                name = f"model.layers.{depth}.mlp.experts.{expert}.{part}.weight"
                yield TensorSpec(name, shape, "bfloat16"), expert, part != "down_proj"


def on_mesh(shape: tuple[int, ...], axes: tuple[int, ...], placements: str, first: int) -> TensorLayout:
    """A layout over SIDE ranks from `first` on."""
    mesh = Mesh(tuple(f"axis{index}" for index in range(len(axes))), axes, tuple(range(first, first + SIDE)))
    return TensorLayout.from_mesh(shape, mesh, tuple(map(parse_placement, placements.split())))


def trainers(kind: str, shape: tuple[int, ...], expert: int) -> TensorLayout:
    """Who holds an expert under FSDP over 16, HSDP 4 x 4, or expert parallelism over 16."""
    if kind == "fsdp16":
        return on_mesh(shape, (16,), "S(0)", 0)
    if kind == "hsdp4x4":
        return on_mesh(shape, (4, 4), "R S(0)", 0)
    return TensorLayout.from_regions(shape, {expert * SIDE // NUM_EXPERTS: [Region.whole(shape)]})


def declared(side: Side, layouts: list[tuple[TensorSpec, TensorLayout]], first: int) -> list[dict[str, Any]]:
    """Plain manifests, as they reach the driver."""
    shards: dict[int, list[LocalShard]] = {rank: [] for rank in range(first, first + SIDE)}
    for spec, layout in layouts:
        for rank, regions in layout.held:
            for region in regions:
                shards[rank].append(LocalShard(spec.name, region, StorageView(spec.name, 0, region.extent, (1, 1))))
    specs = {spec.name: spec for spec, _ in layouts}
    return [
        Manifest(rank, side, tuple(specs[shard.tensor] for shard in found), tuple(found)).to_plain()
        for rank, found in shards.items()
    ]


def measure(kind: str, engine_axes: tuple[int, ...]) -> dict[str, float]:
    """Seconds of each pass for one pair of layouts."""
    given, wanted = [], []
    known: dict[tuple[Any, ...], TensorLayout] = {}
    for spec, expert, by_rows in expert_tensors():
        holder = expert * SIDE // NUM_EXPERTS if kind == "ep16" else 0
        if (spec.shape, holder) not in known:
            known[spec.shape, holder] = trainers(kind, spec.shape, expert)
            cut = "S(0)" if by_rows else "S(1)"
            known[spec.shape, "engine"] = on_mesh(
                spec.shape, engine_axes, cut if len(engine_axes) == 1 else f"R {cut}", SIDE
            )
        given.append((spec, known[spec.shape, holder]))
        wanted.append((spec, known[spec.shape, "engine"]))
    plain_trainers, plain_engines = declared(Side.TRAINER, given, 0), declared(Side.INFERENCE, wanted, SIDE)
    domains = tuple(tuple(range(first, first + 8)) for first in range(0, 2 * SIDE, 8))
    topology = Topology(domains=domains)
    marks = [time.perf_counter()]
    sides = [[Manifest.from_plain(each) for each in plain] for plain in (plain_trainers, plain_engines)]
    marks.append(time.perf_counter())
    source, target = (merge(side) for side in sides)
    check_match(source, target)
    routes = decide_routes(source, target, RoutePolicy.FFN)
    marks.append(time.perf_counter())
    plan = make_plan(source, target, routes, topology)
    marks.append(time.perf_counter())
    check_plan(plan, source, target, routes, topology)
    marks.append(time.perf_counter())
    lower(plan, 0)
    marks.append(time.perf_counter())
    read, matched, planned, proven, lowered = (after - before for before, after in pairwise(marks))
    return {
        "merge, match and route": matched,
        "plan": planned,
        "together": matched + planned,
        "read from JSON types": read,
        "prove": proven,
        "lower one rank": lowered,
    }


def main() -> None:
    """Measure three pairs of layouts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for kind, axes in (("fsdp16", (16,)), ("ep16", (4, 4)), ("hsdp4x4", (4, 4))):
        name = f"{kind} -> {'tp16' if axes == (16,) else 'tp4 x dp4'}"
        results[name] = measure(kind, axes)
        print(name, "  ".join(f"{phase} {seconds:.2f} s" for phase, seconds in results[name].items()))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
