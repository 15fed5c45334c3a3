"""Replicas that no mesh vouches for are proven by value."""

from __future__ import annotations

import json

import pytest
import torch

from nemo_rl_reshard.errors import DeclarationError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.sources.dtensor import DTensorSource
from nemo_rl_reshard.sources.live import NamedTensors
from nemo_rl_reshard.sources.replicas import RegionDigest, check_replicas, replica_digest


def test_the_digest_is_of_values_not_of_strides() -> None:
    """B40 B43: a transposed tensor, a scalar, an empty one and bfloat16 all have a digest of their own."""
    stored = torch.arange(6.0).view(2, 3)
    assert replica_digest(stored.t()) == replica_digest(stored.t().contiguous())
    others = [stored, stored.t(), stored.to(torch.bfloat16), stored.view(3, 2), torch.tensor(3.0), torch.zeros(0, 2)]
    assert len({replica_digest(tensor) for tensor in others}) == len(others)


def test_large_tensors_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.arange(70.0).view(7, 10)
    whole = replica_digest(stored)
    monkeypatch.setattr("nemo_rl_reshard.sources.replicas._CHUNK_ELEMENTS", 20)
    assert replica_digest(stored) == whole
    assert replica_digest(stored.flip(0)) != whole


def test_local_parts_that_pose_as_replicas_are_found() -> None:
    """B11: shapes agree on every rank, values do not, so the tensor was no replica."""
    whole = torch.arange(8.0).view(4, 2)
    digests = {}
    for rank in (0, 1, 2):
        tensors = {"norm": torch.ones(3), "w": whole[:2] if rank < 2 else whole[2:]}
        digests[rank] = DTensorSource(NamedTensors(tensors), rank).replica_digests()
    with pytest.raises(DeclarationError, match=r"1 fault\n  - w: ranks \[0, 1\] and ranks \[2\] hold different values"):
        check_replicas(digests)
    digests.pop(2)
    check_replicas(digests)


def test_partly_overlapping_regions_cannot_be_proven() -> None:
    def entry(start: int, size: int) -> RegionDigest:
        return RegionDigest("w", Region((start,), (size,)), "aa")

    check_replicas({0: [entry(0, 2)], 1: [entry(2, 2)]})
    with pytest.raises(DeclarationError, match=r"w: ranks \[0\].*ranks \[1\].*cannot be proven equal"):
        check_replicas({0: [entry(0, 2)], 1: [entry(1, 2)]})


def test_digests_survive_plain_types() -> None:
    digest = RegionDigest("w", Region((1, 0), (2, 3)), "0f")
    assert RegionDigest.from_plain(json.loads(json.dumps(digest.to_plain()))) == digest
    with pytest.raises(DeclarationError, match="malformed"):
        RegionDigest.from_plain(["w"])
