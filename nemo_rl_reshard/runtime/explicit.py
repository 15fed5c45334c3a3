"""Source and target made of plain tensors and the regions they hold: what `verify`, `bench` and tests move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from nemo_rl_reshard.errors import TargetError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.shard import LocalShard, StorageView
from nemo_rl_reshard.params.spec import TensorSpec

Shards = Mapping[str, Sequence[tuple[Region, Tensor]]]
"""Tensor name -> its regions on this rank and where they live; a tensor may be strided."""


class _ExplicitEndpoint:
    """What both ends share: declared specs, and the memory of every region."""

    def __init__(self, specs: Iterable[TensorSpec], shards: Shards) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.shards = shards

    @property
    def device(self) -> torch.device:
        """Where the first shard lies; all lie there."""
        return next((values.device for held in self.shards.values() for _, values in held), torch.device("cpu"))

    def view(self, tensor: str, region: Region) -> Tensor:
        """The elements of `region`. Raises TargetError if no shard contains it."""
        for held, values in self.shards.get(tensor, ()):
            if held.contains(region):
                return values[region.relative_to(held).slices]
        raise TargetError(f"{tensor}: no shard here contains {region}")

    def _manifest(self, rank: int, side: Side) -> Manifest:
        shards = []
        for tensor, held in self.shards.items():
            for place, (region, values) in enumerate(held):
                view = StorageView(f"{tensor}[{place}]", 0, tuple(values.shape), values.stride())
                shards.append(LocalShard(tensor, region, view))
        return Manifest(rank, side, tuple(self._specs.values()), tuple(shards))


class ExplicitSource(_ExplicitEndpoint):
    """A trainer rank that holds `shards`."""

    def manifest(self, rank: int) -> Manifest:
        """See `Source.manifest`."""
        return self._manifest(rank, Side.TRAINER)


class ExplicitTarget(_ExplicitEndpoint):
    """An inference rank that needs `shards`; its loader cuts whole tensors. Counts what an engine must be told."""

    def __init__(self, specs: Iterable[TensorSpec], shards: Shards) -> None:
        super().__init__(specs, shards)
        self.done: list[str] = []
        self.loaded: list[str] = []
        self.version: int | None = None
        self.is_usable = True
        self._is_open = False

    def manifest(self, rank: int, specs: Sequence[TensorSpec]) -> Manifest:
        """See `Target.manifest`; declares its own dtypes, which decide what travels."""
        missing = sorted(self._specs.keys() - {spec.name for spec in specs})
        if missing:
            raise TargetError(f"no trainer has {', '.join(missing)}")
        return self._manifest(rank, Side.INFERENCE)

    def begin(self, version: int) -> None:  # noqa: ARG002 - part of the protocol
        """See `Target.begin`."""
        if self._is_open:
            raise TargetError("the target is already open: the last refit was neither finished nor abandoned")
        self._is_open, self.is_usable, self.version = True, False, None
        self.done, self.loaded = [], []

    def tensor_done(self, tensor: str) -> None:
        """See `Target.tensor_done`."""
        self.done.append(tensor)

    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """See `Target.load`."""
        for tensor, whole in named:
            self.loaded.append(tensor)
            for region, values in self.shards.get(tensor, ()):
                values.copy_(whole[region.slices])

    def finish(self, version: int) -> None:
        """See `Target.finish`. Raises TargetError naming the tensors that came twice or not at all."""
        came = [*self.done, *self.loaded]
        wrong = sorted({tensor for tensor in self.shards if came.count(tensor) != 1})
        if wrong:
            raise TargetError(f"not written exactly once: {', '.join(wrong)}")
        self._is_open, self.is_usable = False, True
        self.version = version

    def abandon(self) -> None:
        """See `Target.abandon`."""
        self._is_open, self.is_usable, self.version = False, False, None
