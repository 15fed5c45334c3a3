"""One side of one tensor of a refit spec: mesh and placements, or explicit shards, turned into a layout."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

from nemo_rl_reshard.cli.spec_fields import Fields, is_whole
from nemo_rl_reshard.errors import FaultList, LayoutError
from nemo_rl_reshard.layout import Mesh, Placement, Region, Replicate, TensorLayout, parse_placement

_TORN = re.compile(r"^\s*SS\(\s*\d+\s*$")
_TORN_REST = re.compile(r"^\s*\d+\s*\)\s*$")


def read_side(plain: Any, place: str, shape: tuple[int, ...] | None, faults: FaultList) -> TensorLayout | None:
    """The layout that `plain` gives a tensor of `shape`, or None with its faults noted.

    With shape None (itself faulty, and noted) everything that needs no shape is still checked.
    """
    if not isinstance(plain, dict):
        faults.add(f"{place}: must be a mapping with ranks and placements, or with shards; got {plain!r}")
        return None
    fields = Fields(plain, place, faults, ("ranks", "placements", "shards"))
    if "shards" in fields:
        if "ranks" in fields or "placements" in fields:
            fields.fault("gives shards and also ranks or placements; keep one of the two forms")
        return _from_shards(fields, shape)
    mesh = _read_mesh(fields)
    placements = _read_placements(fields, mesh, shape)
    if mesh is None or placements is None or shape is None:
        return None
    try:
        return TensorLayout.from_mesh(shape, mesh, placements)
    except LayoutError as fault:
        fields.fault(str(fault), "placements")
        return None


def _read_mesh(fields: Fields) -> Mesh | None:
    """The grid that nested `ranks` spell."""
    if fields.lacks("ranks", "the ranks as a list, nested once per further mesh axis"):
        return None
    grid = fields.plain["ranks"]
    shape: list[int] = []
    level = [grid]
    while isinstance(level[0], list):
        if not all(isinstance(entry, list) and len(entry) == len(level[0]) for entry in level) or not level[0]:
            fields.fault(f"{grid!r} is not a full grid: lists of one depth must be equally long and not empty", "ranks")
            return None
        shape.append(len(level[0]))
        level = [inner for entry in level for inner in entry]
    if not shape:
        fields.fault(f"{grid!r} is not a list of ranks", "ranks")
        return None
    wrong = [entry for entry in level if not is_whole(entry) or entry < 0]
    if any(isinstance(entry, list) for entry in wrong):
        fields.fault(f"{grid!r} is not a full grid: lists and ranks stand side by side", "ranks")
        return None
    twice = sorted({entry for entry in level if level.count(entry) > 1}) if not wrong else []
    for entry in wrong:
        fields.fault(f"{entry!r} is not a rank; ranks are non-negative whole numbers", "ranks")
    for rank in twice:
        fields.fault(f"rank {rank} is named {level.count(rank)} times", "ranks")
    if wrong or twice:
        return None
    return Mesh(tuple(f"axis {axis}" for axis in range(len(shape))), tuple(shape), tuple(level))


def _read_placements(fields: Fields, mesh: Mesh | None, shape: tuple[int, ...] | None) -> tuple[Placement, ...] | None:
    """One placement per mesh axis, each checked against the dims of the tensor."""
    if fields.lacks("placements", "one of R, S(d), SS(d,k) per mesh axis"):
        return None
    texts = fields.plain["placements"]
    if not isinstance(texts, list):
        fields.fault(f"{texts!r} is not a list; give one of R, S(d), SS(d,k) per mesh axis", "placements")
        return None
    texts = _mend_torn(fields, texts)
    found: list[Placement] = []
    for axis, text in enumerate(texts):
        field = f"placements[{axis}]"
        try:
            placement = parse_placement(text if isinstance(text, str) else str(text))
        except LayoutError as fault:
            fields.fault(str(fault), field)
            continue
        if not isinstance(placement, Replicate) and shape is not None and placement.dim >= len(shape):
            fields.fault(f"{placement} cuts dim {placement.dim}, and shape {list(shape)} has {len(shape)} dims", field)
            continue
        found.append(placement)
    if mesh is not None and len(texts) != len(mesh.shape):
        fields.fault(f"{len(texts)} placements for a mesh of {len(mesh.shape)} axes {list(mesh.shape)}", "placements")
        return None
    return tuple(found) if len(found) == len(texts) else None


def _mend_torn(fields: Fields, texts: list[Any]) -> list[Any]:
    """Put an unquoted SS(d,k), which YAML tears at its comma inside a flow list, together again, with a fault noted."""
    mended: list[Any] = []
    for text in texts:
        if mended and isinstance(mended[-1], str) and _TORN.match(mended[-1]) and _TORN_REST.match(str(text)):
            mended[-1] = f"{mended[-1].strip()},{str(text).strip()}"
            fields.fault(f'YAML reads {mended[-1]} as two entries; write "{mended[-1]}" with quotes', "placements")
        else:
            mended.append(text)
    return mended


def _from_shards(fields: Fields, shape: tuple[int, ...] | None) -> TensorLayout | None:
    """The layout of explicit shards, which must lie inside the shape and, on one rank, apart from each other."""
    listed = fields.plain["shards"]
    if not isinstance(listed, list) or not listed:
        fields.fault("must be a list of {rank, offset, extent}, and not empty", "shards")
        return None
    regions: dict[int, list[Region]] = {}
    sound = True
    for index, plain in enumerate(listed):
        field = f"shards[{index}]"
        if not isinstance(plain, dict):
            fields.fault(f"{plain!r} is not a mapping of rank, offset and extent", field)
            sound = False
            continue
        shard = fields.inner(field, plain, ("rank", "offset", "extent"))
        rank = None if shard.lacks("rank", "a rank") else plain["rank"]
        offset = shard.whole_numbers("offset", "a list of non-negative whole numbers, one per dim")
        extent = shard.whole_numbers("extent", "a list of non-negative whole numbers, one per dim")
        if "rank" in plain and (not is_whole(rank) or rank < 0):
            shard.fault(f"{rank!r} is not a rank; ranks are non-negative whole numbers", "rank")
            sound = False
        elif rank is None or offset is None or extent is None or shape is None:
            sound = False
        elif len(offset) != len(shape) or len(extent) != len(shape):
            shard.fault(f"rank {rank}: offset {list(offset)} and extent {list(extent)} must have {len(shape)} dims")
            sound = False
        elif not Region.whole(shape).contains(Region(offset, extent)):
            shard.fault(f"rank {rank}: {list(offset)} + {list(extent)} reaches outside shape {list(shape)}")
            sound = False
        else:
            regions.setdefault(rank, []).append(Region(offset, extent))
    for rank, held in regions.items():
        for one, other in combinations(held, 2):
            if not one.is_empty and not other.is_empty and (shared := one.intersect(other)) is not None:
                both = f"{list(shared.offset)} + {list(shared.extent)}"
                fields.fault(f"rank {rank}: two of its shards share {both}; a rank lists each element once", "shards")
                sound = False
    return TensorLayout.from_regions(shape, regions) if sound and shape is not None else None
