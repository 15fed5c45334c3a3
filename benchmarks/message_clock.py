"""The step clock beside a clock of single messages, on a few layers of models that refits were published for.

python benchmarks/message_clock.py, about 4 minutes. Times are over what the busiest NIC needs at the wire efficiency.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from equipment.message_clock import message_clock

from nemo_rl_reshard.cli.hf_model import read_model
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.plan.step_loads import step_loads
from nemo_rl_reshard.simulate.recurrence import run_clock
from nemo_rl_reshard.topology import from_preset
from nemo_rl_reshard.virtual.megatron import megatron_source
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.places import Place
from nemo_rl_reshard.virtual.vllm import vllm_target

ROWS = (
    ("qwen3-30b-a3b", 4, {"world": 16, "pp": 2, "ep": 8}, {"world": 16, "tp": 8, "dp": 2}),
    ("qwen3-235b-a22b", 2, {"world": 32, "tp": 4, "pp": 2, "ep": 16}, {"world": 32, "tp": 8, "dp": 4}),
    ("deepseek-v3", 5, {"world": 32, "pp": 2, "ep": 16, "stages": (3, 2)}, {"world": 32, "tp": 32}),
)
SIZES = ((16, 4), (64, 1))
"""Messages in flight, MiB of the largest, in buckets of 64 MiB; the first are the defaults of a refit."""


def first_layers(model: ModelShape, count: int) -> ModelShape:
    """The model without its later layers."""
    kept = [spec for spec in model.specs if (layer := Place.of(spec.name).layer) is None or layer < count]
    return ModelShape(model.name, model.architecture, tuple(kept), model.config)


def main() -> None:
    """Print a table in Markdown."""
    print("| model, layers | ranks | messages | step clock | windows of messages | rounds of NCCL |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, layers, trainers, engines in ROWS:
        model = first_layers(read_model({"preset": name}), layers)
        source = megatron_source(model, **trainers)
        target = vllm_target(model, **engines, first_rank=len(source.ranks))
        topology = from_preset("dgx-h100", [source.ranks, target.ranks])
        routes = decide_routes(source, target, RoutePolicy.ALL, model.architecture)
        for in_flight, mib in SIZES:
            options = PlanOptions(bucket_bytes=64 << 20, message_bytes=mib << 20)
            plan = make_plan(source, target, routes, topology, options)
            loads = step_loads(plan)
            most = max(loads.network_sent.sum(axis=0).max(), loads.network_received.sum(axis=0).max())
            unit_s = most / (topology.network_bytes_per_s * topology.wire_efficiency)
            found = [run_clock(loads, topology).end_s]
            found += [
                message_clock(plan, source, topology, in_flight=in_flight, in_rounds=in_rounds)
                for in_rounds in (False, True)
            ]
            cells = " | ".join(f"{seconds / unit_s:.2f}" for seconds in found)
            ranks = f"{len(source.ranks)} + {len(target.ranks)}"
            print(f"| {name}, {layers} | {ranks} | {in_flight} of {mib} MiB | {cells} |", flush=True)


if __name__ == "__main__":
    main()
