"""LocalShard: a region of a checkpoint tensor and the strided box of local storage where it lives."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_reshard.layout import Region


@dataclass(frozen=True, slots=True, order=True)
class StorageView:
    """A strided box in the local tensor called `storage`.

    `offset` and `stride` count elements from that tensor's own first element; `extent` has one entry per dim of the
    checkpoint tensor (so a transposed or expert-indexed destination differs only in `stride` and `offset`).
    """

    storage: str
    offset: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class LocalShard:
    """What one rank holds (trainer) or needs (inference) of `tensor`: `region`, found at `view` of equal extent."""

    tensor: str
    region: Region
    view: StorageView
