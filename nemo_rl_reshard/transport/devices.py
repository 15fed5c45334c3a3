"""DeviceReport: where a rank's weights lie and whether it could join NCCL, declared before a world is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_reshard.errors import DeclarationError


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What one rank says of its devices.

    `weights` is "cuda" or "cpu" if all of them lie there, "mixed" if they lie on both, "none" if the rank has none.
    `device` is where its bytes would lie over NCCL, as torch names it in this process; `accelerator` names the same
    GPU for the whole job. `obstacle` says why this rank cannot join NCCL, and is empty if it can; `nccl` is its
    version.
    """

    weights: str
    device: str = "cpu"
    accelerator: str = ""
    obstacle: str = ""
    nccl: str = ""

    @classmethod
    def of(cls, devices: Iterable[torch.device]) -> DeviceReport:
        """The report of a rank whose weights lie on `devices`."""
        found = set(devices)
        kinds = sorted({device.type for device in found})
        weights = kinds[0] if len(kinds) == 1 else "mixed" if kinds else "none"
        cuda = sorted(str(device) for device in found if device.type == "cuda")
        foreign = [kind for kind in kinds if kind not in ("cpu", "cuda")]
        obstacle = ""
        if foreign:
            obstacle = f"its weights lie on {', '.join(foreign)}"
        elif not torch.cuda.is_available():
            obstacle = "there is no CUDA device"
        elif not (dist.is_nccl_available() and hasattr(dist, "ProcessGroupNCCL")):
            obstacle = "its torch is built without NCCL"
        elif len(cuda) > 1:
            obstacle = f"its weights lie on {', '.join(cuda)}, and a rank has one GPU"
        if obstacle:
            return cls(weights, obstacle=obstacle)
        device = cuda[0] if cuda else f"cuda:{torch.cuda.current_device()}"
        return cls(
            weights,
            device=device,
            # The index says nothing to another process: each may be shown other devices.
            accelerator=str(torch.cuda.get_device_properties(torch.device(device)).uuid),
            nccl=".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        )

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Inverse of `from_plain`."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> DeviceReport:
        """Read what `to_plain` wrote. Raises DeclarationError if it is malformed."""
        try:
            return cls(**plain)
        except TypeError as fault:
            raise DeclarationError(f"malformed device report: {fault}") from fault
