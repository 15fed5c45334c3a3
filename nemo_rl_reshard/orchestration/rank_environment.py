"""What ranks' environments tell the libraries that move bytes, compared before any group of ranks is made.

NCCL and gloo read the environment themselves, so nobody can pass this as an argument. Nothing else in the package reads
it but `transport/nccl_backend.py`, which keeps torch's watchdog off while it makes a group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import pairwise

from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.params.manifest import Side

MUST_BE_EQUAL: Mapping[str, str | None] = {
    "NCCL_ALGO": None,
    "NCCL_BUFFSIZE": None,
    "NCCL_CUMEM_ENABLE": None,
    "NCCL_CUMEM_HOST_ENABLE": None,
    "NCCL_IB_DISABLE": "0",
    "NCCL_NET": None,
    "NCCL_P2P_DISABLE": "0",
    "NCCL_P2P_LEVEL": None,
    "NCCL_PROTO": None,
    "NCCL_SHM_DISABLE": "0",
}
"""How two ranks reach each other: each decides for itself, and they fail or hang if they do not decide alike.

The value is what unset means; None where NCCL decides by the machine.
"""

MAY_DIFFER = ("GLOO_SOCKET_IFNAME", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME")
"""Names of a host's own devices, and what NeMo RL itself sets on one side (NVLS, for engines that span hosts)."""


def rank_environment() -> dict[str, str]:
    """The variables above that are set in this process."""
    return {name: os.environ[name] for name in (*MUST_BE_EQUAL, *MAY_DIFFER) if name in os.environ}


def compare_environments(
    environments: Mapping[int, Mapping[str, str]], num_trainers: int, *, is_nccl: bool
) -> tuple[str, ...]:
    """A sentence, with sides, ranks and values, for every difference between what the ranks have set.

    Ranks below `num_trainers` are trainers. Raises ConfigError listing those that must not be if `is_nccl`; over gloo
    NCCL's variables move nothing.
    """
    faults = FaultList("the ranks' environments do not fit NCCL; set each of these alike on both sides", ConfigError)
    warnings: list[str] = []
    for name in (*MUST_BE_EQUAL, *MAY_DIFFER):
        values = {rank: found.get(name, MUST_BE_EQUAL.get(name)) for rank, found in sorted(environments.items())}
        if len(set(values.values())) > 1:
            sentence = f"{name} is {_who_has_what(values, num_trainers)}"
            if is_nccl and name in MUST_BE_EQUAL:
                faults.add(sentence)
            else:
                warnings.append(sentence)
    faults.raise_if_any()
    return tuple(warnings)


def _who_has_what(values: Mapping[int, str | None], num_trainers: int) -> str:
    groups: dict[tuple[str | None, Side], list[int]] = {}
    for rank, value in values.items():
        groups.setdefault((value, Side.TRAINER if rank < num_trainers else Side.INFERENCE), []).append(rank)
    return "; ".join(
        f"{'unset' if value is None else repr(value)} on {side} ranks {_ranges(ranks)}"
        for (value, side), ranks in groups.items()
    )


def _ranges(ranks: Iterable[int]) -> str:
    """Ascending `ranks` as text: "0-3, 6"."""
    ordered = list(ranks)
    gaps = [(before, after) for before, after in pairwise(ordered) if after != before + 1]
    starts = [ordered[0], *(after for _, after in gaps)]
    ends = [*(before for before, _ in gaps), ordered[-1]]
    spans = zip(starts, ends, strict=True)
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)
