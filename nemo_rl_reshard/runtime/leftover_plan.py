"""Which leftover tensors travel in which batch, and which trainer contributes which region of each; pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import cut
from nemo_rl_reshard.params.classify import expert_group
from nemo_rl_reshard.params.spec import TensorSpec

ALIGNMENT = 16
"""Bytes. Every tensor and piece starts at a multiple, so that its bytes can be read as its dtype in place."""


class Gather(StrEnum):
    """Who assembles the whole tensors: every trainer, as `full_tensor()` does, or only the one that sends them on."""

    EVERYWHERE = "everywhere"
    ROOT = "root"


class Piece(NamedTuple):
    """A region that trainer `rank` contributes: at `share_offset` bytes of what it sends in its batch.

    `place` is the tensor's index in the batch.
    """

    place: int
    region: Region
    rank: int
    share_offset: int


Share = list[list[Any]]
"""Pieces as JSON types, a list for each batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole tensors that are gathered, broadcast and loaded together.

    Tensor i lies at `offsets[i]` of the `nbytes` bytes that are broadcast. Every trainer contributes `share_nbytes`
    bytes, the most that one has to give, so that all take part in the same collectives whatever they hold.
    """

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    nbytes: int
    share_nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class LeftoverProgram:
    """The batches in order, and the ranks that gather and receive them. Rank `root`, a trainer, sends them on.

    `digest` is that of the whole, of which a rank knows only its share of the pieces.
    """

    trainers: tuple[int, ...]
    receivers: tuple[int, ...]
    root: int
    gather: Gather
    batches: tuple[Batch, ...]
    digest: str = ""

    def shares(self) -> dict[int, Share]:
        """The pieces that each trainer must know: its own, and for the root all. Receivers need none."""
        found: dict[int, Share] = {rank: [[] for _ in self.batches] for rank in self.trainers}
        for number, batch in enumerate(self.batches):
            for piece in batch.pieces:
                plain = [piece.place, list(piece.region.offset), list(piece.region.extent), *piece[2:]]
                for rank in {piece.rank, self.root}:
                    found[rank][number].append(plain)
        return found

    def renumbered(self, index: Mapping[int, int]) -> LeftoverProgram:
        """The same for a world in which rank r is rank `index[r]`."""
        batches = tuple(
            replace(batch, pieces=tuple(piece._replace(rank=index[piece.rank]) for piece in batch.pieces))
            for batch in self.batches
        )
        return replace(
            self,
            trainers=tuple(index[rank] for rank in self.trainers),
            receivers=tuple(index[rank] for rank in self.receivers),
            root=index[self.root],
            batches=batches,
        )

    def with_share(self, share: Share) -> LeftoverProgram:
        """The same with the pieces of `share`. Raises PlanError if it is malformed, or of other batches."""
        try:
            batches = tuple(
                replace(
                    batch,
                    pieces=tuple(
                        Piece(place, Region(tuple(offset), tuple(extent)), rank, share_offset)
                        for place, offset, extent, rank, share_offset in pieces
                    ),
                )
                for batch, pieces in zip(self.batches, share, strict=True)
            )
        except (TypeError, ValueError) as fault:
            raise PlanError(f"malformed share of the leftovers: {fault}") from fault
        return replace(self, batches=batches)

    def to_plain(self) -> dict[str, Any]:
        """What all ranks are told alike, as JSON types: no pieces; see `shares`."""
        return {
            "trainers": list(self.trainers),
            "receivers": list(self.receivers),
            "root": self.root,
            "gather": str(self.gather),
            "digest": self.digest,
            "batches": [
                {
                    "specs": [[spec.name, list(spec.shape), spec.dtype] for spec in batch.specs],
                    "offsets": list(batch.offsets),
                    "nbytes": batch.nbytes,
                    "share_nbytes": batch.share_nbytes,
                }
                for batch in self.batches
            ],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LeftoverProgram:
        """Read what `to_plain` wrote; has no pieces yet. Raises PlanError if a field is missing or malformed."""
        try:
            return cls(
                trainers=tuple(plain["trainers"]),
                receivers=tuple(plain["receivers"]),
                root=int(plain["root"]),
                gather=Gather(plain["gather"]),
                digest=str(plain["digest"]),
                batches=tuple(
                    Batch(
                        specs=tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in batch["specs"]),
                        offsets=tuple(batch["offsets"]),
                        nbytes=int(batch["nbytes"]),
                        share_nbytes=int(batch["share_nbytes"]),
                        pieces=(),
                    )
                    for batch in plain["batches"]
                ),
            )
        except (KeyError, TypeError, ValueError) as fault:
            raise PlanError(f"malformed leftover program: {fault}") from fault


def atomic_group(tensor: str) -> str:
    """Tensors of one group are loaded in one call.

    Loaders that fuse experts see all experts of a layer at once or none, and those of draft layers demand every
    layer; any other tensor is a group of its own.
    """
    return "mtp." if tensor.startswith("mtp.") else expert_group(tensor) or tensor


def plan_leftovers(
    specs: Sequence[TensorSpec],
    held: Mapping[str, TensorLayout],
    trainers: Sequence[int],
    receivers: Sequence[int],
    *,
    bucket_bytes: int,
    gather: Gather = Gather.EVERYWHERE,
    group: Callable[[str], str] = atomic_group,
) -> LeftoverProgram:
    """Batch `specs` (wire dtype, model order) and share out who contributes what of the layouts in `held`.

    A batch holds whole groups and stays under a quarter of `bucket_bytes`, so that the two sets of buffers that
    overlap stay within two buckets; a larger group is a batch of its own. Of replicas, the trainer with the least to
    send so far contributes. Raises PlanError when an element is held by no trainer, ValueError for no trainer or an
    empty bucket.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    if not trainers:
        raise ValueError("leftovers need at least one trainer")
    load = dict.fromkeys(trainers, 0)
    batches = tuple(_batch(members, held, load) for members in _grouped(specs, group, max(1, bucket_bytes // 4)))
    program = LeftoverProgram(tuple(trainers), tuple(receivers), min(trainers), gather, batches)
    canonical = json.dumps([program.to_plain(), program.shares()[program.root]], sort_keys=True, separators=(",", ":"))
    return replace(program, digest=hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest())


def _grouped(specs: Iterable[TensorSpec], group: Callable[[str], str], limit: int) -> list[list[TensorSpec]]:
    """Whole groups, in order of their first member, joined while they fit in `limit` bytes."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(group(spec.name), []).append(spec)
    batches: list[list[TensorSpec]] = []
    room = 0
    for members in groups.values():
        nbytes = sum(_aligned(spec.nbytes) for spec in members)
        if not batches or nbytes > room:
            batches.append([])
            room = limit
        batches[-1] += members
        room -= nbytes
    return batches


def _batch(specs: Sequence[TensorSpec], held: Mapping[str, TensorLayout], load: dict[int, int]) -> Batch:
    """Lay out one batch; `load` counts the bytes that each trainer sends in all."""
    offsets = []
    nbytes = 0
    pieces = []
    share = dict.fromkeys(load, 0)
    for index, spec in enumerate(specs):
        offsets.append(nbytes)
        nbytes += _aligned(spec.nbytes)
        for region, rank in _contributions(spec, held[spec.name], load):
            pieces.append(Piece(index, region, rank, share[rank]))
            size = _aligned(region.numel * spec.item_size)
            share[rank] += size
            load[rank] += size
    return Batch(tuple(specs), tuple(offsets), nbytes, max(share.values()), tuple(pieces))


def _contributions(spec: TensorSpec, layout: TensorLayout, load: Mapping[int, int]) -> list[tuple[Region, int]]:
    """Disjoint regions that make up all of `spec`, each with the trainer that contributes it."""
    whole = Region.whole(spec.shape)
    found = [(region, rank) for rank, regions in layout.held for region in regions]
    growing = dict(load)
    chosen = []
    for cell in cut([region for region, _ in found]):
        region = cell.region.intersect(whole)
        if region is None:
            continue
        rank = min((found[index][1] for index in cell.inside), key=lambda holder: (growing[holder], holder))
        growing[rank] += region.numel * spec.item_size
        chosen.append((region, rank))
    if sum(region.numel for region, _ in chosen) != spec.numel:
        raise PlanError(
            f"{spec.name}: the trainers do not hold all of its {spec.numel} elements; it cannot be gathered"
        )
    return chosen


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
