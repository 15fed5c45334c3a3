"""The five constants of the simulated baselines: one set for every model, machine and layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """What the published designs reach in practice, where topologies give nominal rates only.

    The values are the least-squares fit of `benchmarks/fit_simulator.py` over the published rows; `STARTING` holds
    what was expected of them before. Links of every other kind run at the topology's `wire_efficiency`, which comes
    from elsewhere: 44.3 of 50 GB/s over a whole pull of 82.5 GB (prime-rl, pull request 3341).

    - `collective_fraction`: part of the NICs' nominal rate that gathers and broadcasts of whole tensors keep up.
    - `copy_bytes_per_s`: one rank's rate of staging what it sends or receives: stacking and packing at trainers,
      unpacking and copying into fused weights at engines. A few thread blocks do it (NCCL M2N takes 8), so it is not
      the memory's rate and does not grow with it.
    - `tensor_s`: seconds to export, pack, unpack and load one whole tensor under its checkpoint name.
    - `piece_s`: seconds for which one shard that a trainer adds to a reshard call keeps the call's stream without
      moving bytes: a call for all experts of a projection stacks one for each expert that the trainer holds.
    - `refit_s`: seconds per refit whatever the model: remote calls, synchronisation, post-load processing.
    """

    collective_fraction: float
    copy_bytes_per_s: float
    tensor_s: float
    piece_s: float
    refit_s: float


FITTED = Constants(
    collective_fraction=0.661,
    copy_bytes_per_s=64.3e9,
    tensor_s=70.9e-6,
    piece_s=0.284e-3,
    refit_s=0.355,
)
"""The fit."""

STARTING = Constants(
    # Half of nominal: the order of what broadcasts over many hosts reach.
    collective_fraction=0.5,
    # 8 of an H100's 132 multiprocessors, each with its share of 3.35 TB/s, would move 200 GB/s, read and write.
    copy_bytes_per_s=100e9,
    # A few Python calls and CUDA launches on both sides.
    tensor_s=50e-6,
    # The same, with hooks and a place in a stack; calls wait for each other across the network.
    piece_s=0.3e-3,
    # Remote calls, synchronisation and post-load processing of one engine.
    refit_s=0.3,
)
"""Orders of magnitude, guessed before any fit: it starts here, and stays near where the rows do not say otherwise."""
