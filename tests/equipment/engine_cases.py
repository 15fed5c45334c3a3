"""A script: run refit cases on real engines in this process, one JSON line of findings per case.

`python engine_cases.py FOLDER CASE...`. All cases of one run share the environment that `engines.environment` gives.
Two engines per case, on seeds 0 and 1, each refitted to the other's weights and back: an engine's own record of its
first weights is what the other one, refitted to them, must equal.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipment.checkpoints import make_checkpoint
from equipment.engines import engine, greedy

LEFTOVERS = ("q_proj.weight", "o_proj.weight", "mlp.gate.weight", "embed_tokens.weight", "experts.1.up_proj.weight")


@dataclass(frozen=True, slots=True)
class Case:
    """One engine layout: `name` says family, dtype, tensor-parallel size, expert parallelism and write mode."""

    family: str
    dtype: str
    tensor_parallel: int
    expert_parallel: bool
    mode: str

    @classmethod
    def parse(cls, name: str) -> Case:
        family, dtype, ranks, mode = name.split(":")
        return cls(family, dtype, int(ranks[2]), ranks.endswith("ep"), mode)


def run(folder: Path, case: Case) -> dict[str, Any]:
    """Both engines of a case; findings are compared by the tests."""
    dtype = getattr(torch, case.dtype)
    checkpoints = [make_checkpoint(folder, case.family, seed, dtype) for seed in (0, 1)]
    return {"engines": [_one_engine(case, checkpoints, own) for own in (0, 1)]}


def _one_engine(case: Case, checkpoints: list[Path], own: int) -> dict[str, Any]:
    options = {"dtype": case.dtype, "enable_expert_parallel": case.expert_parallel}
    with engine(checkpoints[own], case.tensor_parallel, **options) as llm:
        found: dict[str, Any] = {"fresh": _record(llm)}
        addresses = llm.collective_rpc("addresses")
        found["declared"] = llm.collective_rpc("declare", args=(str(checkpoints[own]), case.mode))
        found["after_trace"] = _record(llm)
        found["refits"] = []
        # To the other's weights, through views alone, and back to the first ones, partly through the loader.
        for version, (seed, leftovers) in enumerate([(1 - own, ()), (own, LEFTOVERS)], start=1):
            done = llm.collective_rpc("refit", args=(str(checkpoints[seed]), version, list(leftovers)))
            found["refits"].append({"seed": seed, "done": done, **_record(llm)})
        found["addresses_kept"] = llm.collective_rpc("addresses") == addresses
        return found


def _record(llm: Any) -> dict[str, Any]:
    assert llm.reset_prefix_cache()
    return {"tokens": greedy(llm), "parameters": llm.collective_rpc("digest_parameters")}


def main() -> None:
    """Run every case named on the command line; a failing one reports its error and the rest go on."""
    folder, *names = sys.argv[1:]
    for name in names:
        try:
            findings = run(Path(folder), Case.parse(name))
        except Exception:
            findings = {"error": traceback.format_exc()}
        sys.stdout.write("\nCASE " + json.dumps({"name": name, **findings}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
