"""What a worker tells about itself when the plugin is attached, before anything of the refit is set up."""

from __future__ import annotations

import os
import socket
from typing import Any

from nemo_rl_reshard import __version__

COMPARED_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_CROSS_NIC",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
)
"""Communicators that span both sides fail or hang where these differ between them."""


def describe(worker: Any) -> dict[str, Any]:
    """Plain facts about the process of `worker`, a policy worker or a vLLM worker, and which rank it takes itself for.

    `architecture` is the model's, as its transformers-like configuration names it, or None; `rank` is -1 where there
    is none. Raises nothing.
    """
    named = getattr(getattr(getattr(worker, "model", None), "config", None), "architectures", None)
    return {
        "rank": int(getattr(worker, "rank", -1)),
        "kind": type(worker).__name__,
        "architecture": str(named[0]) if named else None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "package": __version__,
        # Read to be compared between the sides, never to decide anything by.
        "variables": {name: os.environ.get(name) for name in COMPARED_VARIABLES},  # noqa: TID251
    }
