"""Putting a tensor together from what ranks declared, with proof that every element came exactly once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from nemo_rl_reshard.layout import Region

Shown = Iterable[tuple[Region, torch.Tensor]]


def reassemble(shape: tuple[int, ...], shown: Iterable[Shown]) -> torch.Tensor:
    """The whole tensor from each rank's (region, values). Equal regions are replicas and must agree bit for bit.

    Fails when two different regions overlap, and when an element has no holder.
    """
    distinct: dict[Region, torch.Tensor] = {}
    for regions in shown:
        for region, values in regions:
            assert tuple(values.shape) == region.extent, f"view of {values.shape} for {region}"
            if region in distinct:
                assert torch.equal(distinct[region], values), f"replicas differ in {region}"
            distinct[region] = values
    dtype = next(iter(distinct.values())).dtype
    whole = torch.zeros(shape, dtype=dtype)
    count = torch.zeros(shape, dtype=torch.int32)
    for region, values in distinct.items():
        whole[region.slices] = values
        count[region.slices] += 1
    assert torch.equal(count, torch.ones_like(count)), "some elements have no holder, or two"
    return whole
