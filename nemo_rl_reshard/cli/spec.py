"""A refit spec, read from YAML or JSON, all faults at once; this file reads the form with explicit tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_rl_reshard.cli.refit_spec import RefitSpec, check_buckets, faults_in, read_options, read_policy
from nemo_rl_reshard.cli.spec_fields import Fields, is_whole, nearest
from nemo_rl_reshard.cli.spec_side import read_side
from nemo_rl_reshard.cli.spec_text import read_plain
from nemo_rl_reshard.cli.spec_topology import read_topology
from nemo_rl_reshard.errors import ConfigError, DeclarationError, FaultList
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import gaps
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.dtype import ITEM_SIZE
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import Route, RouteKind, RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions

__all__ = ["RefitSpec", "parse_spec", "read_spec"]

_KEYS = ("tensors", "topology", "route", "colocated", "bucket_bytes", "message_bytes")


def read_spec(path: Path) -> RefitSpec:
    """Read a spec file. Raises ConfigError listing every fault with tensor, rank and field."""
    plain, repeated = read_plain(path)
    return parse_spec(plain, str(path), repeated, path.parent)


def parse_spec(
    plain: Any, name: str = "refit spec", repeated: list[str] | None = None, folder: Path | None = None
) -> RefitSpec:
    """Read a spec from plain values; `repeated` are faults found while they were read. Raises as `read_spec`.

    `folder` is where files that it names are looked for first.
    """
    faults = FaultList(name, ConfigError)
    faults.extend(repeated or [])
    if not isinstance(plain, dict):
        raise ConfigError(
            f"{name}: must be a mapping with a list of tensors, or a model and two sides; got {type(plain).__name__}"
        )
    if "model" in plain and "tensors" not in plain:
        from nemo_rl_reshard.cli.spec_model import parse_model_spec

        return parse_model_spec(plain, faults, folder)
    fields = Fields(plain, "", faults, _KEYS)
    tensors = _Tensors(faults)
    listed = [] if fields.lacks("tensors", "a list of tensors") else plain["tensors"]
    if "tensors" in fields and (not isinstance(listed, list) or not listed):
        faults.add("tensors: must be a list of tensors, and not empty")
        listed = []
    for index, entry in enumerate(listed):
        tensors.read(entry, index)
    colocated = fields.flag("colocated")
    if not colocated:
        tensors.check_disjoint()
    topology = read_topology(plain.get("topology"), (sorted(tensors.sources), sorted(tensors.targets)), faults)
    policy = read_policy(plain.get("route", RoutePolicy.FFN), faults)
    options = read_options(fields)
    source, target = tensors.catalogs()
    routes: Mapping[str, Route] = {}
    try:
        # Ranks of both sides are checked above, over sound and faulty tensors alike.
        check_match(source, target, colocated=True)
        routes = decide_routes(source, target, policy)
    except DeclarationError as fault:
        faults.extend(faults_in(fault))
    tensors.check_cover(routes)
    tensors.check_sizes(options)
    faults.raise_if_any()
    return RefitSpec(source, target, routes, topology, options)


class _Tensors:
    """The tensors read so far. Those with faults are counted for the ranks they name, and left out of the catalogs."""

    def __init__(self, faults: FaultList) -> None:
        self.sources: dict[int, str] = {}
        self.targets: dict[int, str] = {}
        self._faults = faults
        self._names: set[str] = set()
        self._sound: list[tuple[TensorSpec, TensorLayout, TensorLayout]] = []
        self._seen_sides: dict[tuple[str, tuple[int, ...] | None, str], TensorLayout] = {}
        self._seen_layouts: dict[TensorLayout, TensorLayout] = {}

    def read(self, plain: Any, index: int) -> None:
        """Read one entry of `tensors:`."""
        if not isinstance(plain, dict):
            self._faults.add(f"tensors[{index}]: must be a mapping with name, shape, dtype, source and target")
            return
        name = plain.get("name")
        named = isinstance(name, str) and name != "" and name.isprintable()
        place = f"tensor {name!r}" if named else f"tensors[{index}]"
        fields = Fields(plain, place, self._faults, ("name", "shape", "dtype", "source", "target"))
        if not named:
            if not fields.lacks("name", "the checkpoint name"):
                fields.fault(f"{name!r} is not a name; give text that can be printed", "name")
        elif name in self._names:
            fields.fault("this name is given to two tensors", "name")
            named = False
        else:
            self._names.add(str(name))
        shape = fields.whole_numbers("shape", "a list of non-negative whole numbers, one per dim")
        dtype = _read_dtype(fields)
        sides = [self._read_side(fields, key, shape) for key in ("source", "target")]
        if named and shape is not None and dtype is not None and sides[0] is not None and sides[1] is not None:
            self._sound.append((TensorSpec(str(name), shape, dtype), sides[0], sides[1]))

    def _read_side(self, fields: Fields, key: str, shape: tuple[int, ...] | None) -> TensorLayout | None:
        if fields.lacks(key, "ranks and placements, or shards"):
            return None
        plain = fields.plain[key]
        # Thousands of tensors share a few layouts; a side that was in order once is not read again.
        known_as = (key, shape, repr(plain))
        if known_as in self._seen_sides:
            return self._seen_sides[known_as]
        ranks = self.sources if key == "source" else self.targets
        for rank in _ranks_named(plain):
            ranks.setdefault(rank, fields.place)
        layout = read_side(plain, f"{fields.place}: {key}", shape, self._faults)
        if layout is None:
            return None
        # Equal layouts are one object, so that whatever is worked out for one of them is found again by identity.
        layout = self._seen_layouts.setdefault(layout, layout)
        self._seen_sides[known_as] = layout
        return layout

    def check_disjoint(self) -> None:
        """Note every rank that is on both sides."""
        for rank in sorted(self.sources.keys() & self.targets.keys()):
            self._faults.add(
                f"rank {rank} is on both sides ({self.sources[rank]}: source, {self.targets[rank]}: target); "
                "give it to one side, or set colocated: true"
            )

    def catalogs(self) -> tuple[Catalog, Catalog]:
        """Source and target catalog of the tensors without faults."""
        specs = {spec.name: spec for spec, _, _ in self._sound}
        sources = {spec.name: source for spec, source, _ in self._sound}
        targets = {spec.name: target for spec, _, target in self._sound}
        return (
            Catalog(Side.TRAINER, specs, sources, {}, tuple(sorted(self.sources))),
            Catalog(Side.INFERENCE, specs, targets, {}, tuple(sorted(self.targets))),
        )

    def check_cover(self, routes: Mapping[str, Route]) -> None:
        """Note every tensor with elements that no source rank holds, and that a target rank or gathering it needs."""
        known: dict[tuple[int, int], list[Region]] = {}
        for spec, source, target in self._sound:
            key = (id(source), id(target))
            if key not in known:
                held = sorted({region for _, regions in source.held for region in regions})
                known[key] = list(gaps(Region.whole(spec.shape), held))
            for gap in known[key]:
                takers = [rank for rank, regions in target.held if any(gap.intersect(region) for region in regions)]
                if takers:
                    self._faults.add(
                        f"tensor {spec.name!r}: source: no rank holds {list(gap.offset)} + {list(gap.extent)}, "
                        f"which target ranks {takers} need"
                    )
                elif spec.name in routes and routes[spec.name].kind is RouteKind.LEFTOVER:
                    self._faults.add(
                        f"tensor {spec.name!r}: source: no rank holds {list(gap.offset)} + {list(gap.extent)}, and a "
                        "leftover is gathered whole; let a rank hold it, or set route: all"
                    )

    def check_sizes(self, options: PlanOptions) -> None:
        """Note every tensor that would be cut into so many buckets that planning would not end."""
        check_buckets((spec for spec, _, _ in self._sound), options, self._faults)


def _ranks_named(plain: Any) -> list[int]:
    """Every rank that a side names, whether or not the side is otherwise in order."""
    if not isinstance(plain, dict):
        return []
    found = []
    shards = plain.get("shards")
    pending = [plain.get("ranks")]
    if isinstance(shards, list):
        pending += [entry.get("rank") for entry in shards if isinstance(entry, dict)]
    while pending:
        entry = pending.pop()
        if isinstance(entry, list):
            pending += entry
        elif is_whole(entry) and entry >= 0:
            found.append(entry)
    return found


def _read_dtype(fields: Fields) -> str | None:
    if fields.lacks("dtype", f"one of {', '.join(ITEM_SIZE)}"):
        return None
    dtype = fields.plain["dtype"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        fields.fault(f"unknown dtype {dtype!r}; {nearest(str(dtype), ITEM_SIZE)}", "dtype")
        return None
    return dtype
