"""Functions that tests run inside NeMo RL's stock actors, the way the plugin runs its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from equipment.ray_faults import Planned, with_fault
from torch.distributed.tensor import DTensor

from nemo_rl_reshard.orchestration.rank_operations import HeldRank

Plain = dict[str, tuple[str, list[int], bytes]]
"""Name -> dtype, shape and bytes, so that a tensor of any dtype passes through every transport of Ray and vLLM."""


def process_id(_worker: Any) -> int:
    return os.getpid()


def change_weights(worker: Any, factor: float) -> None:
    """Other values in every place of every parameter, the same in all replicas; a stand-in for an optimizer's step."""
    with torch.no_grad():
        for parameter in worker.model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.mul_(factor).add_(0.001 * factor)


def placements(worker: Any, tensors: list[str]) -> dict[str, str]:
    """Name -> how it is placed in each dimension of its mesh that spreads over more than one trainer."""
    held = dict(worker.model.named_parameters())
    return {name: _placement(held[name]) for name in tensors}


def full_tensors(worker: Any) -> Plain:
    """What the stock generator of whole tensors yields. A collective: run on all trainers at once."""
    # Each version of the worker has a generator of its own.
    stock = importlib.import_module(type(worker).__module__)
    with torch.no_grad():
        return to_plain(stock.dtensor_params_generator(worker.model, worker.dtype))


def engine_parameters(worker: Any) -> Plain:
    """Every parameter of an engine worker's model."""
    return to_plain(worker.model_runner.model.named_parameters())


def forget_parameters(worker: Any) -> None:
    """NaN in every place, so that whatever is not written shows."""
    with torch.no_grad():
        for parameter in worker.model_runner.model.parameters():
            parameter.fill_(torch.nan)


def load_whole(worker: Any, tensors: Plain) -> None:
    """What NeMo RL's worker does with whole tensors that arrived: vLLM's loader, then its processing after loading."""
    forget_parameters(worker)
    with torch.no_grad(), worker._weight_update_lifecycle("collective") as finalize:
        worker._load_weights(list(from_plain(tensors).items()))
        finalize()


def plan_fault(worker: Any, kind: str, tensor: str) -> None:
    """Have this rank's end of the refit world strike when `tensor` is next viewed."""
    session = HeldRank.of(worker).session
    assert session is not None
    end = session._source if session._source is not None else session._target
    with_fault(end, Planned(kind, tensor), lambda: True)


def leave_world(worker: Any) -> None:
    """This rank can take no part in the next refit, which therefore fails before anything is written."""
    HeldRank.of(worker).close()


def to_plain(named: Iterable[tuple[str, torch.Tensor]]) -> Plain:
    return {name: (str(each.dtype), list(each.shape), _bytes(each)) for name, each in named}


def from_plain(plain: Plain) -> dict[str, torch.Tensor]:
    return dict(_tensors(plain))


def _placement(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    # Some names are members of an enumeration of text.
    names = [str(getattr(name, "value", name)) for name in mesh.mesh_dim_names or ()]
    each = zip(names, mesh.shape, tensor.placements, strict=True)
    return " ".join(f"{name}: {placement}" for name, size, placement in each if size > 1)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _tensors(plain: Plain) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (dtype, shape, content) in plain.items():
        flat = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype.removeprefix("torch.")))
        yield name, flat.reshape(shape)
