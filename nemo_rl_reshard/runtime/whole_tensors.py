"""WholeTensors: a target that also takes leftovers, which arrive in pieces and go to the engine's loader whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.runtime.endpoint import Target
from nemo_rl_reshard.transport.staging import torch_dtype


class WholeTensors:
    """Stands before `target` for the messages of one rank.

    A leftover has memory from the first of its bytes until the loader has placed it. Finished ones wait until they
    are `batch_bytes` together, since a call of the loader costs more than small tensors do. `device` is where bytes
    arrive. A reference that the loader keeps stays valid: no buffer is used twice.
    """

    def __init__(self, target: Target, leftovers: Sequence[TensorSpec], device: torch.device, batch_bytes: int) -> None:
        self._target = target
        self._specs = {spec.name: spec for spec in leftovers}
        self._device = device
        self._batch_bytes = batch_bytes
        self._arriving: dict[str, Tensor] = {}
        self._finished: dict[str, Tensor] = {}
        self._num_done = 0
        self._held_bytes = 0
        self._finished_bytes = 0
        self.peak_bytes = 0

    def begin(self) -> None:
        """Before the first message of a refit; whatever a failed one left is dropped."""
        self._arriving.clear()
        self._finished.clear()
        self._held_bytes = self._finished_bytes = self.peak_bytes = 0
        # Nothing arrives of what has no elements, and the loader wants it all the same.
        self._finished.update((spec.name, self._memory(spec)) for spec in self._specs.values() if not spec.numel)
        self._num_done = len(self._finished)
        if self._finished and self._num_done == len(self._specs):
            self._load()

    def is_leftover(self, tensor: str) -> bool:
        """Whether `tensor` goes to the loader whole."""
        return tensor in self._specs

    def view(self, tensor: str, region: Region) -> Tensor:
        """Where `region` of `tensor` is written: in the target, or in the memory of a leftover."""
        spec = self._specs.get(tensor)
        if spec is None:
            return self._target.view(tensor, region)
        whole = self._arriving.get(tensor)
        if whole is None:
            if tensor in self._finished:
                raise PlanError(f"{tensor}: written or forwarded after it was complete")
            whole = self._arriving[tensor] = self._memory(spec)
            self._held_bytes += spec.nbytes
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return whole[region.slices]

    def tensor_done(self, tensor: str) -> None:
        """Every write and every forward of `tensor` is finished on this rank."""
        spec = self._specs.get(tensor)
        if spec is None:
            self._target.tensor_done(tensor)
            return
        self._finished[tensor] = self._arriving.pop(tensor)
        self._finished_bytes += spec.nbytes
        self._num_done += 1
        if self._finished_bytes >= self._batch_bytes or self._num_done == len(self._specs):
            self._load()

    def _memory(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self._device)

    def _load(self) -> None:
        named = list(self._finished.items())
        self._finished.clear()
        self._held_bytes -= self._finished_bytes
        self._finished_bytes = 0
        self._target.load(named)
