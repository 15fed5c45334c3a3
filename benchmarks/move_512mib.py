"""512 MiB of fp32 matrices from TP4 to TP2 x DP2, one domain per rank: reshard against its baselines, in one run.

    python benchmarks/move_512mib.py [--mib 512] [--repeats 5] [--nemo-rl CHECKOUT] [--json OUT]

16 matrices of [2048, 4096]: 4 trainers hold row quarters; of 4 receivers, two replicas of two, each holds half of
the rows of even matrices and half of the columns of odd ones. Receivers take 1 GiB in all. Eight processes over gloo,
one thread each; rounds run everything in turn with warm buffers, medians are printed. With a NeMo RL checkout its
Python reshard makes the same move over gloo, in processes of its own right afterwards.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from peer_nemo_rl import PeerRank, peer_rank

from nemo_rl_reshard.cli.bench_spec import bench_spec
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.cli.spec import parse_spec

NUM_TENSORS = 16
ROWS = 2048


def move_spec(mib: int) -> dict[str, Any]:
    """The move as a refit spec."""
    columns = (mib << 20) // 4 // NUM_TENSORS // ROWS
    return {
        "tensors": [
            {
                "name": f"model.layers.{index}.mlp.{'down_proj' if index % 2 else 'gate_proj'}.weight",
                "shape": [ROWS, columns],
                "dtype": "float32",
                "source": {"ranks": [0, 1, 2, 3], "placements": ["S(0)"]},
                "target": {"ranks": [[4, 5], [6, 7]], "placements": ["R", "S(1)" if index % 2 else "S(0)"]},
            }
            for index in range(NUM_TENSORS)
        ],
        "route": "all",
    }


def time_nemo_rl(checkout: Path, mib: int, repeats: int) -> float:
    """Median seconds of NeMo RL's Python reshard for the same move."""
    with tempfile.TemporaryDirectory() as folder:
        asked = PeerRank(str(checkout), str(Path(folder) / "meeting"), mib, repeats)
        times = run_ranks(peer_rank, [asked] * 8, num_trainers=4, timeout_s=600)
    return median(max(rank[turn] for rank in times) for turn in range(repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the model in MiB")
    parser.add_argument("--repeats", type=int, default=5, help="rounds after the warm-up, at least 5")
    parser.add_argument("--in-flight", type=int, default=16, help="messages under way per rank and direction")
    parser.add_argument("--nemo-rl", type=Path, help="a NeMo RL checkout to measure against")
    parser.add_argument("--json", type=Path, help="write the whole result here")
    asked = parser.parse_args()
    result = bench_spec(parse_spec(move_spec(asked.mib)), repeats=asked.repeats, in_flight=asked.in_flight)
    if asked.nemo_rl:
        result["seconds"]["nemo_rl_python"] = time_nemo_rl(asked.nemo_rl, asked.mib, asked.repeats)
        result["speedup_vs_nemo_rl_python"] = result["seconds"]["nemo_rl_python"] / result["seconds"]["reshard"]
    result["command"] = shlex.join(["python", *sys.argv])
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    print(result["command"])
    for name, seconds in result["seconds"].items():
        print(f"  {name:26s} {seconds:8.3f} s")
    print(f"  line rate                  {result['line_bytes_per_s'] / 1e9:8.2f} GB/s over all pairs")
    for name in (
        "fraction_of_line_rate",
        "speedup_vs_gather_broadcast",
        "speedup_vs_gather_to_root_broadcast",
        "gather_broadcast_fraction_of_line_rate",
        *(["speedup_vs_nemo_rl_python"] if asked.nemo_rl else []),
    ):
        print(f"  {name:38s} {result[name]:6.2f}")
    print(f"  extra memory per rank, at most {max(result['peak_extra_bytes'].values()) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
