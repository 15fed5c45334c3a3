"""Catalog: the manifests of one side merged, with proof that together they can mean something."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_rl_reshard.errors import DeclarationError, FaultList
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import gaps, overlaps
from nemo_rl_reshard.params.manifest import Manifest, Side
from nemo_rl_reshard.params.order import model_order
from nemo_rl_reshard.params.spec import TensorSpec

_Held = tuple[int, tuple[int, ...], tuple[int, ...]]  # rank, offset, extent
_NAMED = 8  # tensors named one by one in a fault that many share


@dataclass(frozen=True)
class Catalog:
    """What one side holds or needs. All mappings are in model order.

    `layouts` has every name of `specs`; equal layouts are one object, so 100,000 tensors stay small. `indirect` maps
    the tensors that this side cannot prove direct to the reason. `ranks` are all ranks of the side, ascending, those
    that hold nothing included.
    """

    side: Side
    specs: Mapping[str, TensorSpec]
    layouts: Mapping[str, TensorLayout]
    indirect: Mapping[str, str]
    ranks: tuple[int, ...] = ()


def merge(manifests: Sequence[Manifest]) -> Catalog:
    """Merge the manifests of one side, in any order.

    Raises one DeclarationError that lists every fault: no manifest, both sides mixed, a rank twice, a tensor twice on
    one rank, ranks that disagree on a shape or dtype, shards of unnamed tensors, outside the shape, overlapping on one
    rank or unequal to their view, and on the trainer side elements that no rank holds.
    """
    faults = FaultList("merging declarations", DeclarationError)
    if not manifests:
        raise DeclarationError("merging declarations: no rank declared anything")
    ordered = sorted(manifests, key=lambda manifest: manifest.rank)
    side = ordered[0].side
    for before, after in pairwise(ordered):
        if before.rank == after.rank:
            faults.add(f"rank {after.rank} declares twice; each rank must declare once")
    faults.extend(
        f"rank {manifest.rank} is on side {manifest.side}, rank {ordered[0].rank} on side {side}; merge one side"
        for manifest in ordered
        if manifest.side != side
    )
    specs = _merge_specs(ordered, faults)
    layouts = _merge_layouts(ordered, specs, side, faults)
    indirect: dict[str, str] = {}
    for manifest in ordered:
        for name, reason in manifest.indirect:
            if name in specs:
                indirect.setdefault(name, reason)
            else:
                faults.add(f"{name}: rank {manifest.rank} calls it indirect without naming its shape and dtype")
    faults.raise_if_any()
    return Catalog(
        side=side,
        specs=specs,
        layouts=layouts,
        indirect={name: indirect[name] for name in specs if name in indirect} if indirect else {},
        ranks=tuple(manifest.rank for manifest in ordered),
    )


def _merge_specs(ordered: Sequence[Manifest], faults: FaultList) -> dict[str, TensorSpec]:
    """All specs in model order; faults where ranks contradict each other."""
    found: dict[str, tuple[TensorSpec, int]] = {}
    sequences: dict[tuple[str, ...], None] = {}
    contradicted: set[str] = set()
    for manifest in ordered:
        rank = manifest.rank
        names = []
        for spec in manifest.specs:
            names.append(spec.name)
            known = found.setdefault(spec.name, (spec, rank))[0]
            if known is spec or (known.shape == spec.shape and known.dtype == spec.dtype):
                continue
            if spec.name not in contradicted:
                contradicted.add(spec.name)
                faults.add(
                    f"{spec.name}: rank {found[spec.name][1]} declares shape {known.shape} {known.dtype}, rank {rank} "
                    f"declares shape {spec.shape} {spec.dtype}; every rank must give the whole tensor's"
                )
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            faults.add(f"rank {rank} names {_listed(twice)} twice")
        sequences.setdefault(tuple(names))
    return {name: found[name][0] for name in model_order(list(sequences))}


def _merge_layouts(
    ordered: Sequence[Manifest], specs: Mapping[str, TensorSpec], side: Side, faults: FaultList
) -> dict[str, TensorLayout]:
    """The layout of every spec, equal ones as one object; faults where shards cannot be what they say."""
    held: defaultdict[str, list[_Held]] = defaultdict(list)
    for manifest in ordered:
        rank = manifest.rank
        for shard in manifest.shards:
            region = shard.region
            held[shard.tensor].append((rank, region.offset, region.extent))
            if shard.view.extent != region.extent:
                faults.add(
                    f"{shard.tensor}: rank {rank} gives region extent {region.extent} and a storage view of extent "
                    f"{shard.view.extent}; they must be equal"
                )
    for name in held.keys() - specs.keys():
        ranks = sorted({rank for rank, _, _ in held[name]})
        faults.add(f"{name}: ranks {ranks} give shards of it without naming its shape and dtype")
    layouts: dict[str, TensorLayout] = {}
    by_shards: dict[tuple[tuple[int, ...], tuple[_Held, ...]], TensorLayout | None] = {}
    interned: dict[TensorLayout, TensorLayout] = {}
    broken: dict[tuple[tuple[int, ...], tuple[_Held, ...]], tuple[list[str], list[str]]] = {}
    for name, spec in specs.items():
        key = (spec.shape, tuple(held.get(name, ())))
        if key not in by_shards:
            problems = _problems(spec.shape, key[1], complete=side is Side.TRAINER)
            if problems:
                broken[key] = (problems, [])
                by_shards[key] = None
            else:
                regions: defaultdict[int, list[Region]] = defaultdict(list)
                for rank, offset, extent in key[1]:
                    regions[rank].append(Region(offset, extent))
                layout = TensorLayout.from_regions(spec.shape, regions)
                by_shards[key] = interned.setdefault(layout, layout)
        known = by_shards[key]
        if known is None:
            broken[key][1].append(name)
        else:
            layouts[name] = known
    for problems, names in broken.values():
        faults.extend(f"{_listed(names)}: {problem}" for problem in problems)
    return layouts


def _problems(shape: tuple[int, ...], held: Sequence[_Held], complete: bool) -> list[str]:
    """What is wrong with one tensor's shards, each as the end of a sentence about the tensor."""
    whole = Region.whole(shape)
    problems: list[str] = []
    per_rank: defaultdict[int, list[Region]] = defaultdict(list)
    for rank, offset, extent in held:
        region = Region(offset, extent)
        if len(offset) != len(shape) or not whole.contains(region):
            problems.append(f"rank {rank} gives region {_text(region)}, outside shape {shape}")
        else:
            per_rank[rank].append(region)
    for rank, regions in per_rank.items():
        problems.extend(
            f"rank {rank} gives elements {_text(region)} twice; shards of one rank must be disjoint"
            for region in overlaps(regions)
        )
    if complete and not problems:
        distinct = sorted({region for regions in per_rank.values() for region in regions})
        problems.extend(
            f"no rank holds elements {_text(region)} of shape {shape}; the ranks that declare it are {sorted(per_rank)}"
            for region in gaps(whole, distinct)
        )
    return problems


def _text(region: Region) -> str:
    """A region as people write index ranges: [0:4, 2:8]."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(region.offset, region.stop, strict=True)) + "]"


def _listed(names: Sequence[str]) -> str:
    """Names for a fault: all of a few, the first ones and a count of many."""
    more = f" and {len(names) - _NAMED} more alike" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
