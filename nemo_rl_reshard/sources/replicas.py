"""Proving replicas: ranks that claim the same region without one DTensor that says so must hold the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from nemo_rl_reshard.errors import DeclarationError, FaultList
from nemo_rl_reshard.layout import Region

_CHUNK_ELEMENTS = 1 << 22  # bounds the copy that hashing a non-contiguous tensor needs


@dataclass(frozen=True, slots=True)
class RegionDigest:
    """Digest of what a rank holds in `region` of the training tensor `tensor`."""

    tensor: str
    region: Region
    digest: str

    def to_plain(self) -> list[object]:
        """JSON types only."""
        return [self.tensor, list(self.region.offset), list(self.region.extent), self.digest]

    @classmethod
    def from_plain(cls, plain: Sequence[object]) -> RegionDigest:
        """Read what `to_plain` wrote. Raises DeclarationError if it is malformed."""
        try:
            tensor, offset, extent, digest = plain
            return cls(str(tensor), Region(tuple(offset), tuple(extent)), str(digest))  # type: ignore[arg-type]
        except (TypeError, ValueError) as fault:
            raise DeclarationError(f"malformed replica digest: {fault}") from fault


def replica_digest(tensor: torch.Tensor) -> str:
    """16 hex digits of the values of a dense tensor, its dtype and its shape. Strides do not count."""
    state = blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=8)
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    step = max(1, _CHUNK_ELEMENTS * len(rows) // max(1, rows.numel()))
    for first in range(0, len(rows) if rows.numel() else 0, step):
        chunk = rows[first : first + step].contiguous()
        # One element counts as contiguous with any stride, and torch reads no bytes from that.
        flat = chunk.as_strided((chunk.numel(),), (1,))
        state.update(flat.view(torch.uint8).cpu().numpy().data)
    return state.hexdigest()


def check_replicas(digests: Mapping[int, Sequence[RegionDigest]]) -> None:
    """Compare all ranks' digests. Raises one DeclarationError listing tensors whose holders differ, with the ranks.

    Regions of one tensor must be equal or disjoint: where they overlap in part there is nothing to compare.
    """
    holders: dict[str, dict[Region, dict[str, list[int]]]] = {}
    for rank in sorted(digests):
        for entry in digests[rank]:
            values = holders.setdefault(entry.tensor, {}).setdefault(entry.region, {})
            values.setdefault(entry.digest, []).append(rank)
    faults = FaultList("replicas", DeclarationError)
    for tensor, regions in holders.items():
        for region, values in regions.items():
            if len(values) > 1:
                groups = " and ".join(f"ranks {ranks}" for ranks in values.values())
                faults.add(
                    f"{tensor}: {groups} hold different values in region {region.offset}+{region.extent}; they are not "
                    "replicas. A rank's own part of a tensor must be a DTensor (or a declared region)"
                )
        for first, second in _overlapping(sorted(regions)):
            ranks = [sorted(rank for found in regions[box].values() for rank in found) for box in (first, second)]
            faults.add(
                f"{tensor}: ranks {ranks[0]} hold {first.offset}+{first.extent} and ranks {ranks[1]} hold "
                f"{second.offset}+{second.extent}, on separate meshes; that overlap cannot be proven equal"
            )
    faults.raise_if_any()


def _overlapping(ascending: Sequence[Region]) -> Iterator[tuple[Region, Region]]:
    """Pairs of different regions that share an element or differ in number of dims. Near linear for row blocks."""
    for index, first in enumerate(ascending):
        for other in range(index + 1, len(ascending)):
            second = ascending[other]
            if len(first.extent) != len(second.extent) or first.intersect(second) is not None:
                yield first, second
            elif second.offset[:1] >= first.stop[:1]:
                break
