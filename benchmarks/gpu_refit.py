"""A refit between GPUs of this machine: NCCL and gloo, offloaded weights, a failing rank; every element compared.

    python benchmarks/gpu_refit.py [--mib 512] [--repeats 5] [--device cuda]

Half of the ranks train, half infer, a GPU each; with one GPU two ranks share it, and NCCL is left out since it refuses
that. Every case refits twice with other values (torch.equal on every shard), times warm refits, and prints one line or
what went wrong. Exit code 0 if every case is right, 1 if one is not, 2 if nothing could run. With `--device cpu` it
tests itself. Written, not yet run on GPUs.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank, explicit_ranks
from nemo_rl_reshard.cli.position_code import position_code
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.errors import RefitAbortedError
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.runtime.world import join_processes

NUM_TENSORS = 8
LIMIT_S = 300.0


@dataclass(frozen=True)
class Case:
    """What is tried: over which transport, with the trainers' weights where, and whether a rank fails in between."""

    name: str
    transport: str
    offloaded: bool = False
    fails: bool = False


@dataclass(frozen=True)
class Asked:
    """What one rank's process is told."""

    explicit: ExplicitRank
    case: Case
    device: str
    repeats: int


def spec(num_trainers: int, num_engines: int, mib: int) -> dict[str, Any]:
    """Rows on trainers, columns on engines; whole matrices that engines forward, and norms that are left over."""
    trainers, engines = list(range(num_trainers)), list(range(num_trainers, num_trainers + num_engines))
    columns = max(64, (mib << 20) // 4 // NUM_TENSORS // 2048)
    tensors: list[dict[str, Any]] = []
    for index in range(NUM_TENSORS):
        tensors.append(
            _tensor(f"model.layers.{index}.mlp.down_proj.weight", [2048, columns], trainers, engines, "S(1)")
        )
        tensors.append(_tensor(f"model.layers.{index}.mlp.up_proj.weight", [256, 96], trainers, engines, "R"))
        tensors.append(_tensor(f"model.layers.{index}.input_layernorm.weight", [1027], trainers, engines, "R"))
    return {"tensors": tensors, "route": "ffn", "topology": {"domains": [[rank] for rank in trainers] + [engines]}}


def _tensor(name: str, shape: list[int], trainers: list[int], engines: list[int], placement: str) -> dict[str, Any]:
    return {
        "name": name,
        "shape": shape,
        "dtype": "float32",
        "source": {"ranks": trainers, "placements": ["S(0)"]},
        "target": {"ranks": engines, "placements": [placement]},
    }


def run_rank(asked: Asked, world: dict[str, Any]) -> dict[str, Any]:
    """One rank's process: refits, checks and times; raises if anything is wrong."""
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    live = LiveRank(asked.explicit, join_processes)
    for end, place in ((live.source, "cpu" if asked.case.offloaded else device), (live.target, device)):
        if end is not None:
            end.shards = {
                name: [(region, values.to(place)) for region, values in held] for name, held in end.shards.items()
            }
    live.session.declare(*([] if live.source is not None else [_specs(asked.explicit)]))
    _connect(live, asked, world, generation=1)
    for turn in (1, 2):
        _refit(live, turn, "full")
        check(live, turn)
    seconds = []
    for turn in range(3, 3 + asked.repeats):
        report = _refit(live, turn, "off")
        # Without the agreement, in which ranks wait for those that still fill their weights.
        seconds.append(report["seconds"] - report["phases"]["declare"])
    check(live, 2 + asked.repeats)
    woken_s = _fail_once(live, asked, world) if asked.case.fails else 0.0
    live.session.close()
    received = sum(report["bytes_received"].values()) + report["leftover_bytes_received"]
    return {"seconds": seconds, "received": received, "extra": report["peak_extra_bytes"], "woken_s": woken_s}


def _specs(explicit: ExplicitRank) -> list[list[Any]]:
    return [[each.name, list(each.shape), each.dtype] for each in explicit.source_specs]


def _connect(live: LiveRank, asked: Asked, world: dict[str, Any], generation: int) -> None:
    live.session.connect({**world, "transport": asked.case.transport, "generation": generation})
    live.session.adopt(live.made_of.handout)


def _refit(live: LiveRank, turn: int, verify: str) -> dict[str, Any]:
    live.fill(turn)
    return live.session.refit({"version": turn, "verify": verify, "deadline_s": 60.0, "seed": turn})


def check(live: LiveRank, turn: int) -> None:
    """Every shard of the target is the trainers' values of `turn`, cast once."""
    if live.target is None:
        return
    numbers = {each.name: (number, each) for number, each in enumerate(live.made_of.source_specs)}
    for name, held in live.target.shards.items():
        number, source = numbers[name]
        for region, values in held:
            wanted = position_code(number, source.shape, region, source.dtype, turn).to(values.dtype)
            if not torch.equal(values.cpu(), wanted):
                raise ValueError(f"{name}: region {region} is not what the trainers hold in refit {turn}")


def _fail_once(live: LiveRank, asked: Asked, world: dict[str, Any]) -> float:
    """The last rank fails in a refit; seconds until this one was woken. Then a new generation must be right."""
    is_last = live.made_of.rank == world["size"] - 1
    done: Callable[[str], None] | None = None
    if is_last and live.target is not None:
        done = live.target.tensor_done

        def fails(tensor: str) -> None:
            raise ValueError(f"{tensor}: failing on purpose")

        live.target.tensor_done = fails  # type: ignore[method-assign]
    start_s = time.perf_counter()
    try:
        _refit(live, 100, "off")
    except RefitAbortedError:
        pass
    except ValueError:
        if not is_last:
            raise
    else:
        raise AssertionError("the refit went on although a rank failed")
    woken_s = time.perf_counter() - start_s
    if done is not None:
        live.target.tensor_done = done  # type: ignore[union-attr, method-assign]
    _connect(live, asked, world, generation=2)
    _refit(live, 101, "full")
    check(live, 101)
    return woken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the large matrices in MiB")
    parser.add_argument("--repeats", type=int, default=5, help="timed refits per case")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count() if options.device == "cuda" else 4
    if not num_gpus:
        print("no CUDA device here")
        sys.exit(2)
    size = max(2, num_gpus)
    cases = [Case("gloo", "gloo", fails=True)]
    if options.device == "cuda" and num_gpus > 1:
        cases = [Case("nccl", "nccl"), Case("nccl, offloaded trainers", "nccl", offloaded=True), *cases]
        cases.append(Case("nccl, a rank fails", "nccl", fails=True))
    read = parse_spec(spec(size // 2, size - size // 2, options.mib))
    # Engines hold bf16, so that trainers cast while they pack.
    specs = {name: replace(each, dtype="bfloat16") for name, each in read.target.specs.items()}
    target = replace(read.target, specs=specs)
    plan = make_plan(read.source, target, read.routes, read.topology, read.options)
    ranks = explicit_ranks(read.source, target, plan, in_rounds=True)
    failed = False
    for case in cases:
        devices = [f"cuda:{rank.rank % num_gpus}" if options.device == "cuda" else "cpu" for rank in ranks]
        asked = [Asked(rank, case, device, options.repeats) for rank, device in zip(ranks, devices, strict=True)]
        try:
            found = run_ranks(run_rank, asked, num_trainers=size // 2, timeout_s=LIMIT_S)
        except Exception:
            failed = True
            print(f"{case.name}: WRONG\n{traceback.format_exc()}")
            continue
        taken_s = median(max(times) for times in zip(*(rank["seconds"] for rank in found), strict=True))
        received = max(rank["received"] for rank in found)
        print(
            f"{case.name}: right, {size} ranks, {taken_s:.4f} s a refit, {received / taken_s / 1e9:.1f} GB/s into the "
            f"busiest rank, {max(rank['extra'] for rank in found) / 2**20:.0f} MiB extra"
            + (f", woken after {max(rank['woken_s'] for rank in found):.1f} s" if case.fails else "")
        )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
