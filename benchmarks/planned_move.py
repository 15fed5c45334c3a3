"""Two moves, and what the planner that is on the path makes of one, as JSON: other states of the planner run this too.

PYTHONPATH=CHECKOUT python benchmarks/planned_move.py ffn|experts
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from move_512mib import move_spec

from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.plan.planner import make_plan


def experts_spec() -> dict[str, Any]:
    """4 layers of 32 experts and attention, 480 MiB in fp32: two stages of EP2 to two engines of TP2."""
    cut = {"ranks": [[4, 5], [6, 7]]}
    tensors = []
    for layer in range(4):
        stage = [0, 1] if layer < 2 else [2, 3]
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            dim = 1 if part == "o_proj" else 0
            tensors.append(
                {
                    "name": f"model.layers.{layer}.self_attn.{part}.weight",
                    "shape": [1024, 1536],
                    "source": {"ranks": stage, "placements": ["R"]},
                    "target": {**cut, "placements": ["R", f"S({dim})"]},
                }
            )
        for expert in range(32):
            for part in ("gate_proj", "up_proj", "down_proj"):
                down = part == "down_proj"
                tensors.append(
                    {
                        "name": f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight",
                        "shape": [1024, 256] if down else [256, 1024],
                        "source": {"ranks": [stage[expert // 16]], "placements": ["R"]},
                        "target": {**cut, "placements": ["R", "S(1)" if down else "S(0)"]},
                    }
                )
    return {"tensors": [{**tensor, "dtype": "float32"} for tensor in tensors], "route": "all"}


MOVES: Mapping[str, Callable[[], dict[str, Any]]] = {"ffn": partial(move_spec, 512), "experts": experts_spec}


def written_plan(move: str) -> list[Any]:
    """What the planner that is on the path says: [tensor, offset, extent, src, dst, link, step] of every transfer."""
    spec = parse_spec(MOVES[move]())
    plan = make_plan(spec.source, spec.target, spec.routes, spec.topology, spec.options)
    return [
        [each.tensor, each.region.offset, each.region.extent, each.src, each.dst, str(each.link), each.step]
        for each in plan.transfers()
    ]


if __name__ == "__main__":
    print(json.dumps(written_plan(sys.argv[1])))
