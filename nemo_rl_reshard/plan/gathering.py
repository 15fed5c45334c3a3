"""Gathering: which trainer contributes which region of a leftover, so that each element is gathered once."""

from __future__ import annotations

from collections import defaultdict

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import cut
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.transfer import Leftover


def gather_pieces(source: Catalog, spec: TensorSpec, reason: str) -> Leftover:
    """The leftover `spec` with the lowest-ranked holder of every region of it; source padding is left out."""
    holder: defaultdict[Region, list[int]] = defaultdict(list)
    whole = Region.whole(spec.shape)
    for rank, regions in source.layouts[spec.name].held:
        for region in regions:
            inside = region.intersect(whole)
            if inside is not None:
                holder[inside].append(rank)
    distinct = sorted(holder)
    pieces = tuple((min(min(holder[distinct[index]]) for index in cell.inside), cell.region) for cell in cut(distinct))
    return Leftover(spec.name, spec.nbytes, reason, pieces)
