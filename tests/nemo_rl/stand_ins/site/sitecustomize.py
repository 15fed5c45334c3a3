"""Stand-ins that must be in place before NeMo RL is imported, in the driver and in every worker process alike.

Python imports this file at start-up because its folder is on PYTHONPATH, which Ray and vLLM hand to every process they
start. It does nothing by itself: it waits until somebody imports `nemo_rl` and sets up what that package expects of a
newer Python, an older transformers and a CUDA build of torch. docs/nemo-rl-test-tier.md lists each with its reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType

#: What `nemo_rl.models.policy` is shown while it is imported; it refuses 5.12 and later, vLLM's CPU build needs 5.16.
ADMITTED_TRANSFORMERS = "5.11.0"


def _admit_typed_dict() -> None:
    """Before 3.12, pydantic accepts only the TypedDict of typing_extensions; NeMo RL is written for 3.13."""
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict


def _silence_nvtx() -> None:
    """A CPU build of torch has the NVTX functions but no library behind them: a range would raise."""
    import torch

    if torch.version.cuda is None:
        for name in ("range_push", "range_pop", "mark"):
            setattr(torch.cuda.nvtx, name, lambda *_, **__: None)


class _OlderTransformers(importlib.abc.Loader):
    """Runs `nemo_rl.models.policy` while transformers gives an admitted version, and puts the true one back."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import transformers
        from transformers import AutoTokenizer  # noqa: F401  (loads what would read the version meanwhile)

        true_version = transformers.__version__
        transformers.__version__ = ADMITTED_TRANSFORMERS
        try:
            self._loader.exec_module(module)
        finally:
            transformers.__version__ = true_version


class _NemoRlFinder(importlib.abc.MetaPathFinder):
    """Sees each import of `nemo_rl` first; everything else passes by."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name == "nemo_rl":
            _admit_typed_dict()
            _silence_nvtx()
        if name != "nemo_rl.models.policy":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _OlderTransformers(spec.loader)
        return spec


sys.meta_path.insert(0, _NemoRlFinder())
