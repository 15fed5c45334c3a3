"""Trace a model's own weight loader: where each checkpoint tensor lands in this rank's parameters, and why not."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from nemo_rl_reshard.errors import FaultList, TargetError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.layout.tiling import overlaps
from nemo_rl_reshard.params.dtype import ITEM_SIZE
from nemo_rl_reshard.params.shard import LocalShard, StorageView
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.targets.trace_geometry import Strided, describe_copy, locate
from nemo_rl_reshard.targets.write_trace import Writes, WriteTrace

_NAMED = 4  # tensors named in a fault that many may share

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], "set[str] | None"]


@dataclass(frozen=True, slots=True)
class LoaderTrace:
    """What the loader does with the checkpoint tensors, on one rank, in load-time parameter layout.

    `places`: per tensor, the regions that are copied as they are, and where to. `indirect`: tensor -> why it is not
    only copied, so that the engine's own loader must place it. `dtypes`: tensor -> dtype of the parameter it lands
    in. `feeds`: tensor -> parameters it writes. `groups`: tensors that the loader must get in one call, since one
    parameter is computed from all of them. `computed`: parameters that are more than copies. `padding`: parameter ->
    views that the loader fills with a constant, and the constant. `partial`: parameters that hold more elements than
    the tensors fill. `tied`: tensor -> the parameter it shares with another tensor.
    `skipped`: optional tensors that the loader refused, with what it said. `ignored`: tensors it took without writing
    anything here (another rank's experts or pipeline stage, or names it drops).
    """

    places: Mapping[str, tuple[LocalShard, ...]]
    indirect: Mapping[str, str]
    dtypes: Mapping[str, str]
    feeds: Mapping[str, frozenset[str]]
    groups: tuple[frozenset[str], ...]
    computed: frozenset[str]
    padding: Mapping[str, tuple[tuple[Strided, float], ...]]
    partial: frozenset[str]
    tied: Mapping[str, str]
    skipped: Mapping[str, str]
    ignored: tuple[str, ...]
    seconds: float

    def shards_of(self, tensor: str) -> tuple[LocalShard, ...]:
        """The regions of a direct tensor that this rank needs; empty for any other tensor."""
        return () if tensor in self.indirect else self.places.get(tensor, ())


def trace_loader(
    load_weights: LoadWeights,
    specs: Sequence[TensorSpec],
    destinations: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    must_cover: Iterable[str],
    optional: Callable[[str], bool],
    converted: Mapping[str, torch.dtype] | None = None,
) -> LoaderTrace:
    """Run `load_weights` once on placeholders of `specs` and explain every write.

    `destinations`: this rank's parameters and buffers, in load-time layout, by name. `aliases`: further names of a
    destination -> its first name (tied weights). `must_cover`: destinations of which every element must be written.
    `optional(name)`: the loader may refuse this tensor. `converted`: destinations whose dtype the engine changed after
    loading -> the dtype they were loaded in. Raises TargetError listing tensors that the loader refuses,
    parameters with elements that no tensor reaches, and parameters that two tensors claim.
    """
    start = time.perf_counter()
    writes, refused = _run(load_weights, list(specs), destinations)
    faults = FaultList("loader tracing", TargetError)
    if specs and len(refused) == len(specs):
        faults.add(f"the loader takes none of the {len(specs)} tensors")
    faults.extend(f"{name}: refused by the loader: {why}" for name, why in refused.items() if not optional(name))
    shapes = {spec.name: spec.shape for spec in specs}
    indirect, groups, computed = _computed(writes)
    placed = _place(writes, shapes, destinations, indirect, computed)
    feeds = _feeds(writes)
    tied = {spec.name: aliases[spec.name] for spec in specs if spec.name in aliases and spec.name not in feeds}
    for name, storage in tied.items():
        indirect[name] = f"it is tied to parameter {storage}, which another tensor fills"
        feeds[name] = frozenset({storage})
    _check_claims(placed, indirect, faults)
    padding: dict[str, list[tuple[Strided, float]]] = defaultdict(list)
    for fill in writes.fills:
        padding[fill.storage].append((fill.target, fill.value))
    filled = {storage: sum(place.shard.region.numel for place in entries) for storage, entries in placed.items()}
    for name in must_cover:
        if name not in computed:
            _check_cover(name, destinations[name], placed.get(name, []), padding.get(name, []), faults)
    for name, storages in feeds.items():
        for storage in storages & (converted or {}).keys():
            indirect.setdefault(name, f"{storage} was converted to {destinations[storage].dtype} after loading")
    places: dict[str, list[LocalShard]] = defaultdict(list)
    for place in chain.from_iterable(placed.values()):
        places[place.shard.tensor].append(place.shard)
    _check_places(places, indirect)
    load_dtypes = {storage: tensor.dtype for storage, tensor in destinations.items()} | dict(converted or {})
    dtypes = _dtypes(specs, feeds, load_dtypes, indirect, faults)
    faults.raise_if_any()
    return LoaderTrace(
        places={name: tuple(sorted(found)) for name, found in places.items()},
        indirect=indirect,
        dtypes=dtypes,
        feeds=feeds,
        groups=groups,
        computed=frozenset(computed),
        padding={storage: tuple(fills) for storage, fills in padding.items()},
        partial=frozenset(name for name, count in filled.items() if count < destinations[name].numel()),
        tied=tied,
        skipped=refused,
        ignored=tuple(spec.name for spec in specs if spec.name not in feeds and spec.name not in refused),
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A proven copy and the box of the parameter it fills; `box` is None where the writes do not form one box."""

    shard: LocalShard
    box: Region | None


def _run(
    load_weights: LoadWeights, specs: list[TensorSpec], destinations: Mapping[str, torch.Tensor]
) -> tuple[Writes, dict[str, str]]:
    """One traced call with all tensors; if it raises, halves, down to the single tensors that the loader refuses."""
    placeholders = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
    }
    trace = WriteTrace(placeholders, destinations)
    try:
        with trace, torch.no_grad():
            load_weights(iter(placeholders.items()))
    except Exception as fault:
        if len(specs) == 1:
            return Writes(), {specs[0].name: f"{type(fault).__name__}: {fault}"}
        middle = len(specs) // 2
        first, refused_first = _run(load_weights, specs[:middle], destinations)
        second, refused_second = _run(load_weights, specs[middle:], destinations)
        return first.joined(second), refused_first | refused_second
    return trace.writes, {}


def _place(
    writes: Writes,
    shapes: Mapping[str, tuple[int, ...]],
    destinations: Mapping[str, torch.Tensor],
    indirect: dict[str, str],
    computed: set[str],
) -> dict[str, list[_Placed]]:
    """Copies that are boxes, per parameter, each once; of the others the tensor becomes indirect."""
    placed: dict[str, dict[_Placed, None]] = defaultdict(dict)
    for record in writes.copies:
        copy = describe_copy(shapes[record.tensor], record.source, record.target)
        if isinstance(copy, str):
            indirect.setdefault(record.tensor, f"{copy}, into {record.storage}")
            computed.add(record.storage)
            continue
        view = StorageView(record.storage, copy.target.offset, copy.region.extent, copy.target.stride)
        base = destinations[record.storage]
        box = locate(tuple(base.shape), tuple(base.stride()), record.target)
        placed[record.storage][_Placed(LocalShard(record.tensor, copy.region, view), box)] = None
    return {storage: list(entries) for storage, entries in placed.items()}


def _computed(writes: Writes) -> tuple[dict[str, str], tuple[frozenset[str], ...], set[str]]:
    """Tensors that feed a computed parameter, by slice or by computation, with reasons; their atomic groups; and
    those parameters."""
    sliced: dict[str, set[str]] = defaultdict(set)
    for record in writes.copies:
        sliced[record.storage].add(record.tensor)
    feeding: dict[str, set[str]] = defaultdict(set)
    reasons: dict[str, str] = {}
    for computed in writes.computed:
        feeding[computed.storage] |= sliced[computed.storage] | computed.tensors
        for storage in computed.storages:
            feeding[computed.storage] |= sliced[storage]
        reasons[computed.storage] = computed.reason
    indirect = {
        tensor: f"{reasons[storage]}, into {storage}"
        for storage, tensors in feeding.items()
        for tensor in sorted(tensors)
    }
    return indirect, _joined(list(feeding.values())), set(feeding)


def _joined(sets: list[set[str]]) -> tuple[frozenset[str], ...]:
    """Merge sets that share a member; keep those with two members or more."""
    groups: list[set[str]] = []
    for found in sets:
        touching = [group for group in groups if group & found]
        groups = [group for group in groups if not group & found] + [found.union(*touching)]
    return tuple(frozenset(group) for group in groups if len(group) > 1)


def _feeds(writes: Writes) -> dict[str, frozenset[str]]:
    feeds: dict[str, set[str]] = defaultdict(set)
    for copied in writes.copies:
        feeds[copied.tensor].add(copied.storage)
    for computed in writes.computed:
        for tensor in computed.tensors:
            feeds[tensor].add(computed.storage)
    return {name: frozenset(storages) for name, storages in feeds.items()}


def _check_claims(placed: Mapping[str, list[_Placed]], indirect: dict[str, str], faults: FaultList) -> None:
    """Two tensors must not claim one element; one tensor that writes it twice is left to the loader."""
    for storage, entries in placed.items():
        twice = overlaps([place.box for place in entries if place.box is not None])
        if not twice:
            continue
        names = sorted(
            {place.shard.tensor for place in entries if place.box and any(place.box.intersect(r) for r in twice)}
        )
        if len(names) > 1:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            faults.add(f"parameter {storage}: {' and '.join(names[:_NAMED])}{more} claim the same elements; send one")
        else:
            indirect.setdefault(names[0], f"it is written more than once, into {storage}")


def _check_places(places: Mapping[str, list[LocalShard]], indirect: dict[str, str]) -> None:
    """A rank takes an element once; a tensor with elements that land in two places is left to the loader."""
    for name, shards in places.items():
        if len(shards) > 1 and overlaps([shard.region for shard in shards]):
            storages = ", ".join(sorted({shard.view.storage for shard in shards}))
            indirect.setdefault(name, f"elements of it land in several places ({storages})")


def _check_cover(
    name: str,
    tensor: torch.Tensor,
    placed: list[_Placed],
    padding: list[tuple[Strided, float]],
    faults: FaultList,
) -> None:
    covered = sum(place.shard.region.numel for place in placed)
    for fill, _ in padding:
        area = locate(tuple(tensor.shape), tuple(tensor.stride()), fill)
        cuts = [] if area is None else [area.intersect(place.box) for place in placed if place.box is not None]
        covered += fill.numel - sum(cut.numel for cut in cuts if cut is not None)
    # A weight creator that pads says how many elements a checkpoint fills.
    needed = min(tensor.numel(), getattr(tensor, "weight_loader_numel", tensor.numel()))
    if covered < needed:
        faults.add(f"parameter {name}: {needed - covered} of {needed} elements are filled by no tensor of the trainer")


def _dtypes(
    specs: Sequence[TensorSpec],
    feeds: Mapping[str, frozenset[str]],
    load_dtypes: Mapping[str, torch.dtype],
    indirect: dict[str, str],
    faults: FaultList,
) -> dict[str, str]:
    """The receiver decides what travels: the dtype of the parameter, per tensor."""
    dtypes: dict[str, str] = {}
    for spec in specs:
        if spec.name not in feeds:
            continue
        found = sorted({str(load_dtypes[storage]).removeprefix("torch.") for storage in feeds[spec.name]})
        unknown = [dtype for dtype in found if dtype not in ITEM_SIZE]
        if unknown:
            faults.add(f"{spec.name}: lands in a parameter of dtype {unknown[0]}; quantised engines are not supported")
            continue
        if len(found) > 1:
            indirect.setdefault(spec.name, f"it lands in parameters of several dtypes ({', '.join(found)})")
        dtypes[spec.name] = found[0] if len(found) == 1 else spec.dtype
    return dtypes
