"""What the runtime asks of a trainer adapter and of an inference adapter; they implement it without importing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.spec import TensorSpec


class Source(Protocol):
    """What one trainer rank holds."""

    def manifest(self, rank: int) -> Manifest:
        """Declare this rank's shards. Raises DeclarationError listing every fault."""

    def view(self, tensor: str, region: Region) -> Tensor:
        """The live elements of `region`, which lies inside one declared shard.

        Strided, `shape == region.extent`, in the dtype of the storage; no copy. The runtime asks anew at every refit
        and keeps nothing, so storage may move or be offloaded in between.
        """


@runtime_checkable
class PreparedSource(Protocol):
    """A source that computes some values, which takes more than its own rank's storage."""

    def prepare(self) -> None:
        """Gather what they take. Called on every trainer at the start of each refit, once all ranks agreed to it."""

    def release(self) -> None:
        """Drop it, after the refit or its failure. Never raises."""

    def devices(self) -> set[torch.device]:
        """Where the declared shards lie now."""


class Target(Protocol):
    """What one inference rank needs, and how to write it.

    A target that takes memory of its own during a refit may say so in an attribute `peak_extra_bytes` (int), and one
    whose weights are not on the CPU must name their `device` (torch.device).
    """

    def manifest(self, rank: int, specs: Sequence[TensorSpec]) -> Manifest:
        """Declare where each of `specs` (the trainers' tensors) lands. Raises TargetError or DeclarationError."""

    def begin(self, version: int) -> None:
        """Open for writing. The engine must be idle."""

    def view(self, tensor: str, region: Region) -> Tensor:
        """Writable elements of `region`, which lies inside one declared shard.

        Strided, `shape == region.extent`, in the target's dtype. Asked for only between `begin` and
        `tensor_done(tensor)`, when bytes are about to land or to be forwarded.
        """

    def tensor_done(self, tensor: str) -> None:
        """Every write and every forward of this direct tensor is finished on this rank; called once per refit."""

    def load(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Leftovers: whole tensors in the target's dtype, for the engine's own loader.

        It may keep references: a buffer that is still referenced afterwards is left to its holder.
        """

    def finish(self, version: int) -> None:
        """Post-load processing, derived caches, tied heads. Raises TargetError when an element was not written."""

    def abandon(self) -> None:
        """After a failure: leave the engine loadable and marked unusable. Never raises."""


def devices_of(end: Source | Target | None, manifest: Manifest) -> set[torch.device]:
    """Where the weights lie that `end` declared in `manifest`. A target's cannot be looked at between refits."""
    if end is None or not manifest.shards:
        return set()
    if manifest.side is Side.INFERENCE:
        return {getattr(end, "device", torch.device("cpu"))}
    if isinstance(end, PreparedSource):
        return end.devices()
    # One look per storage: shards are many, and cut from few.
    shards = {shard.view.storage: shard for shard in manifest.shards}
    return {end.view(shard.tensor, shard.region).device for shard in shards.values()}
