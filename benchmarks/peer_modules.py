"""Single files of a NeMo RL checkout, loaded without what they import: nccl4py, CUDA streams, the rest of NeMo RL."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@dataclass
class PeerMesh:
    """A mesh as NeMo RL's modules take it: its rank numbers."""

    mesh: torch.Tensor


class PeerTensor:
    """A tensor as those modules take it: a local part and a global shape."""

    def __init__(self, local: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._local_tensor = local
        self.shape = torch.Size(shape)
        self.dtype, self.device = local.dtype, local.device


def load_module(checkout: Path, name: str) -> Any:
    """`nemo_rl/weight_sync/<name>.py` of the checkout, under a name of its own. Raises OSError where it is missing."""
    path = checkout / "nemo_rl" / "weight_sync" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    assert spec is not None
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def without_gpus(group_end: Callable[[], None]) -> Iterator[None]:
    """Let those modules issue their NCCL calls here: `group_end` is called where an NCCL group ends."""
    core = types.ModuleType("nccl.core")
    core.group_start, core.group_end = (lambda: None), group_end  # type: ignore[attr-defined]
    package = types.ModuleType("nccl")
    package.core = core  # type: ignore[attr-defined]
    stream = types.SimpleNamespace(cuda_stream=0)
    nothing = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    with (
        mock.patch.dict(sys.modules, {"nccl": package, "nccl.core": core}),
        mock.patch.multiple(
            torch.cuda,
            device=nothing,
            stream=nothing,
            current_stream=lambda *_, **__: stream,
            synchronize=lambda *_, **__: None,
        ),
    ):
        yield
