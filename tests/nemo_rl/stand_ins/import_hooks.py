"""Puts each stand-in in place just when the module of NeMo RL that needs it is imported, in whatever process that is.

So the actors that run are NeMo RL's own classes under their own names, not subclasses of ours, and a process that never
imports NeMo RL is left alone. docs/nemo-rl-test-tier.md lists every stand-in with its reason.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

#: What `nemo_rl.models.policy` is shown while it is imported; it refuses 5.12 and later, vLLM's CPU build needs 5.16.
ADMITTED_TRANSFORMERS = "5.11.0"


@contextmanager
def _newer_python(module: ModuleType) -> Iterator[None]:
    """Before 3.12, pydantic accepts only the TypedDict of typing_extensions; NeMo RL is written for 3.13."""
    if sys.version_info < (3, 12):
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    from stand_ins import cuda_as_cpu

    cuda_as_cpu.silence_nvtx()
    yield


@contextmanager
def _older_transformers(module: ModuleType) -> Iterator[None]:
    # These read the version, and the processors replace the module `transformers` by a new one, while they are loaded.
    from transformers import AutoProcessor, AutoTokenizer  # noqa: F401,I001
    import transformers

    true_version = transformers.__version__
    transformers.__version__ = ADMITTED_TRANSFORMERS
    try:
        yield
    finally:
        transformers.__version__ = true_version


@contextmanager
def _cuda_as_cpu(module: ModuleType) -> Iterator[None]:
    from stand_ins import cuda_as_cpu

    cuda_as_cpu.install()
    yield


@contextmanager
def _engine_worker(module: Any) -> Iterator[None]:
    """NeMo RL's worker methods have a name, for its sparse refit, that vLLM's own worker took since."""
    from stand_ins import cuda_as_cpu

    cuda_as_cpu.install()
    yield
    from vllm.v1.worker.worker_base import WorkerBase

    if hasattr(WorkerBase, "synchronize_device"):
        del module.VllmInternalWorkerExtension.synchronize_device


@contextmanager
def _buffer_size(module: Any) -> Iterator[None]:
    """NeMo RL takes a share of the device's memory, whose size cannot be asked for."""
    yield
    from stand_ins import cuda_as_cpu

    module.get_target_packed_tensor_size = lambda: cuda_as_cpu.BUFFER_BYTES


@contextmanager
def _device_query(module: Any) -> Iterator[None]:
    """NVML has no driver to ask."""
    yield
    from stand_ins import cuda_as_cpu

    module.get_device_uuid = cuda_as_cpu.device_uuid
    module.get_free_memory_bytes = lambda _device: cuda_as_cpu.MEMORY_BYTES


@contextmanager
def _cpu_engine(module: Any) -> Iterator[None]:
    """vLLM's CPU build has no sleep mode and refuses the Ray executor, and NeMo RL asks for both by constants."""
    yield
    complete = module.EngineArgs.__post_init__

    def complete_for_cpu(self: Any) -> None:
        self.enable_sleep_mode = False
        if self.distributed_executor_backend == "ray":
            self.distributed_executor_backend = "mp"
        complete(self)

    module.EngineArgs.__post_init__ = complete_for_cpu


@contextmanager
def _without_triton(module: ModuleType) -> Iterator[None]:
    """Triton 3.9 refuses one of these kernels for a name it does not have; without Triton they are not defined."""
    present = {name: sys.modules.pop(name) for name in ("triton", "triton.language") if name in sys.modules}
    sys.modules["triton"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["triton"]
        sys.modules.update(present)


@contextmanager
def _cpu_meshes(module: Any) -> Iterator[None]:
    """This module is imported before the worker's, even in the driver, and keeps the function it finds."""
    yield
    import torch

    module.init_device_mesh = lambda *of, **named: torch.distributed.device_mesh.init_device_mesh(*of, **named)


STAND_INS: dict[str, Callable[[ModuleType], AbstractContextManager[None]]] = {
    "nemo_automodel.components._peft.lora_kernel": _without_triton,
    "nemo_automodel.components.distributed.mesh_utils": _cpu_meshes,
    "nemo_rl": _newer_python,
    "nemo_rl.models.policy": _older_transformers,
    "nemo_rl.models.policy.workers.dtensor_policy_worker": _cuda_as_cpu,
    "nemo_rl.models.policy.workers.dtensor_policy_worker_v2": _cuda_as_cpu,
    "nemo_rl.models.generation.vllm.vllm_backend": _engine_worker,
    "nemo_rl.utils.nvml": _device_query,
    "nemo_rl.utils.packed_tensor": _buffer_size,
    "vllm.engine.arg_utils": _cpu_engine,
}
"""Module -> what surrounds the execution of its code."""


class _Surrounded(importlib.abc.Loader):
    """A module's own loader, inside the stand-in of that module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with STAND_INS[module.__name__](module):
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Sees each import first, and lets everything pass but the modules of STAND_INS."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name not in STAND_INS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Surrounded(spec.loader)
        return spec


def install() -> None:
    """Safe to call twice."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
