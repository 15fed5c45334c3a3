"""In the processes that call it, the device "cuda" is the CPU: NeMo RL's workers name that device in every method.

What needs CUDA's own meaning (memory handles between processes, graphs, kernels) stays impossible and fails.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

MEMORY_BYTES = 1 << 30
"""What every query for free memory answers."""
BUFFER_BYTES = 4 << 20
"""Of NeMo RL's own broadcast. A small model fits: vLLM 0.32 refuses a tied head that comes without its embedding."""

_FACTORIES = ("arange", "as_tensor", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor")
_FACTORIES += ("zeros", "zeros_like")


def device_uuid(_device: object = None) -> str:
    """One "GPU" per process."""
    return f"GPU-process-{os.getpid()}"


def silence_nvtx() -> None:
    """A CPU build of torch has the NVTX functions but no library behind them: a range would raise."""
    if torch.version.cuda is None:
        for name in ("range_push", "range_pop", "mark"):
            setattr(torch.cuda.nvtx, name, lambda *_, **__: None)


def install() -> None:
    """Safe to call twice; does nothing where CUDA is there."""
    if torch.cuda.is_available() or getattr(torch.Tensor.to, "on_cpu", False):
        return
    _redirect_tensors()
    _redirect_collectives()
    _answer_for_the_device()


def _redirect_tensors() -> None:
    to = _on_cpu(torch.Tensor.to)

    def to_cpu(self: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        # A bare number names a CUDA device too.
        return to(self, *("cpu" if type(each) is int else each for each in arguments), **named)

    to_cpu.on_cpu = True  # type: ignore[attr-defined]
    torch.Tensor.to = to_cpu  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self.to("cpu")  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.autocast = _Autocast  # type: ignore[misc]


def _redirect_collectives() -> None:
    start, mesh = torch.distributed.init_process_group, torch.distributed.device_mesh.init_device_mesh

    @functools.wraps(start)
    def init_process_group(backend: str | None = None, *arguments: Any, **named: Any) -> None:
        start("gloo" if backend == "nccl" else backend, *arguments, **named)

    @functools.wraps(mesh)
    def init_device_mesh(device_type: str, *arguments: Any, **named: Any) -> Any:
        return mesh("cpu" if device_type == "cuda" else device_type, *arguments, **named)

    torch.distributed.init_process_group = init_process_group
    torch.distributed.device_mesh.init_device_mesh = init_device_mesh


def _answer_for_the_device() -> None:
    stream = _Stream()
    answers: dict[str, Callable[..., Any]] = {
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "device": _Device,
        "get_device_name": lambda *_: "cpu",
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "stream": lambda *_: contextlib.nullcontext(),
        "Stream": _Stream,
        "synchronize": lambda *_: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


class _Stream:
    """Everything on the CPU has happened when its call returns."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        """One is like another."""

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def wait_stream(self, _other: object) -> None:
        """Nothing is outstanding."""


class _Device(contextlib.nullcontext):  # type: ignore[type-arg]
    """A class, since vLLM names `torch.cuda.device` and `torch.cuda.Stream` in annotations."""


class _Autocast(torch.autocast):
    def __init__(self, device_type: str, *arguments: Any, **named: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *arguments, **named)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with every argument that names a CUDA device naming the CPU, and no pinned memory."""

    @functools.wraps(function)
    def redirected(*arguments: Any, **named: Any) -> Any:
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if "device" in named:
            named["device"] = _cpu_for(named["device"])
        moved = (_cpu_for(each) if isinstance(each, str | torch.device) else each for each in arguments)
        return function(*moved, **named)

    return redirected


def _cpu_for(device: Any) -> Any:
    if type(device) is int or (isinstance(device, str | torch.device) and torch.device(device).type == "cuda"):
        return torch.device("cpu")
    return device
