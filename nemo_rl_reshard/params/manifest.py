"""Manifest: everything one rank declares, as plain values that survive JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.shard import LocalShard, StorageView
from nemo_rl_reshard.params.spec import TensorSpec


class Side(StrEnum):
    """Which side of a refit a rank is on."""

    TRAINER = "trainer"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One rank's declaration.

    `specs` are the checkpoint tensors this rank takes part in, in the order its model holds them; `shards` what it
    holds or needs of them. `indirect` maps a tensor that this side cannot prove direct to the reason why; such a
    tensor takes the leftover route. A trainer still declares shards for it, since gathering needs them.
    """

    rank: int
    side: Side
    specs: tuple[TensorSpec, ...]
    shards: tuple[LocalShard, ...]
    indirect: tuple[tuple[str, str], ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """JSON types only. Inverse of `from_plain`."""
        return {
            "rank": self.rank,
            "side": str(self.side),
            "specs": [[spec.name, list(spec.shape), spec.dtype] for spec in self.specs],
            "shards": [
                [
                    shard.tensor,
                    list(shard.region.offset),
                    list(shard.region.extent),
                    shard.view.storage,
                    shard.view.offset,
                    list(shard.view.stride),
                ]
                for shard in self.shards
            ],
            "indirect": [list(pair) for pair in self.indirect],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Manifest:
        """Read what `to_plain` wrote. Raises DeclarationError if a field is missing or malformed."""
        try:
            return cls(
                rank=int(plain["rank"]),
                side=Side(plain["side"]),
                specs=tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in plain["specs"]),
                shards=_read_shards(plain["shards"]),
                indirect=tuple((name, reason) for name, reason in plain["indirect"]),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise DeclarationError(f"malformed manifest: {fault}") from fault


def _read_shards(plain: Iterable[Sequence[Any]]) -> tuple[LocalShard, ...]:
    """Shards in order. Equal regions become one object: a model has many tensors and few shapes."""
    regions: dict[tuple[tuple[int, ...], tuple[int, ...]], Region] = {}
    shards = []
    for tensor, offset, extent, storage, start, stride in plain:
        key = (tuple(offset), tuple(extent))
        region = regions.get(key)
        if region is None:
            region = regions[key] = Region(*key)
        shards.append(LocalShard(tensor, region, StorageView(storage, start, region.extent, tuple(stride))))
    return tuple(shards)
