"""Coverage: counts, in every refit, the elements written into each parameter, so that none is forgotten silently."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.shard import LocalShard
from nemo_rl_reshard.targets.write_trace import storage_key, written_argument


class Coverage:
    """Elements each parameter must get (`needed`, by name) against those it got since `begin`."""

    def __init__(self, needed: Mapping[str, int]) -> None:
        self._needed = dict(needed)
        self._written: dict[str, int] = defaultdict(int)
        self._regions: dict[str, set[Region]] = defaultdict(set)

    def begin(self) -> None:
        """Start counting from zero."""
        self._written.clear()
        self._regions.clear()

    def expect_write(self, tensor: str, region: Region) -> None:
        """A view of `region` was handed out for writing."""
        self._regions[tensor].add(region)

    def finish_direct(self, tensor: str, shards: Iterable[LocalShard]) -> None:
        """Every region of `tensor` has arrived: count, per parameter, what was handed out inside each shard."""
        regions = self._regions.pop(tensor, set())
        for shard in shards:
            inside = sum(region.numel for region in regions if shard.region.contains(region))
            self._written[shard.view.storage] += min(inside, shard.region.numel)

    def add(self, written: Mapping[str, int]) -> None:
        """Count what a loader wrote."""
        for storage, count in written.items():
            self._written[storage] += count

    def gaps(self) -> list[str]:
        """One sentence for every parameter that did not get all its elements."""
        return [
            f"parameter {name}: {self._written[name]} of {needed} elements were written in this refit"
            for name, needed in self._needed.items()
            if self._written[name] < needed
        ]


class WriteCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, per destination, the elements that a loader copies into it while this mode is on."""

    def __init__(self, destinations: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[str, int] = defaultdict(int)
        self._names = {storage_key(tensor): name for name, tensor in destinations.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out `func` and count it if it writes into a destination; constants (padding) do not count."""
        written = written_argument(func, args, kwargs or {})
        if written is not None and func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            name = self._names.get(storage_key(written))
            if name is not None:
                self.written[name] += written.numel()
        return func(*args, **(kwargs or {}))
