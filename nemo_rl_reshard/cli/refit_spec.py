"""RefitSpec: what both forms of a refit spec are read into, and the sections that both have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_reshard.cli.requirements import require_memory, require_room
from nemo_rl_reshard.cli.spec_fields import Fields, is_whole, nearest
from nemo_rl_reshard.errors import FaultList, PlanError
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.routing import Route, RoutePolicy
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.topology import Topology

_MOST_BUCKETS = 1 << 16  # of one tensor: 4 TiB in buckets of the default size


@dataclass(frozen=True)
class Described:
    """A spec by model in words: the model, both sides and the machine, and what of the model is assumed."""

    model: str
    source: str
    target: str
    topology: str
    assumptions: tuple[str, ...] = ()
    architecture: str | None = None

    @property
    def title(self) -> str:
        """One line: model, source -> target, machine."""
        return f"{self.model}: {self.source} -> {self.target}, {self.topology}"


@dataclass(frozen=True)
class RefitSpec:
    """What the commands work on. The catalogs hold the same tensors in the same order.

    `described` is there for specs by model only.
    """

    source: Catalog
    target: Catalog
    routes: Mapping[str, Route]
    topology: Topology
    options: PlanOptions
    described: Described | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what all ranks of both sides hold or need, together."""
        return sum(sum(held_bytes(catalog).values()) for catalog in (self.source, self.target))


def require_room_for(spec: RefitSpec) -> None:
    """Raise EnvironmentLacksError where this machine cannot really run the ranks of `spec`, and say what it lacks."""
    if spec.described is None:
        require_memory(spec.nbytes)
    else:
        require_room(spec.nbytes, len({*spec.source.ranks, *spec.target.ranks}))


def held_bytes(catalog: Catalog) -> dict[int, int]:
    """Rank -> bytes of all it holds or needs, for every rank of the side."""
    held = dict.fromkeys(catalog.ranks, 0)
    sizes: dict[tuple[int, int], int] = {}  # tensors of one layout and item size are counted first, then multiplied
    layouts = {}
    for name, layout in catalog.layouts.items():
        key = (id(layout), catalog.specs[name].item_size)
        sizes[key] = sizes.get(key, 0) + 1
        layouts[id(layout)] = layout
    for (layout_id, item_size), count in sizes.items():
        for rank, regions in layouts[layout_id].held:
            nbytes = sum(region.numel for region in regions) * item_size * count
            held[rank] = held.get(rank, 0) + nbytes
    return held


def read_policy(value: Any, faults: FaultList) -> RoutePolicy:
    """The `route:` of a spec."""
    known = [str(policy) for policy in RoutePolicy]
    if value not in known:
        faults.add(f"route: unknown route {value!r}; {nearest(str(value), known)}")
        return RoutePolicy.FFN
    return RoutePolicy(value)


def read_options(fields: Fields, bucket_bytes: int = PlanOptions().bucket_bytes) -> PlanOptions:
    """`bucket_bytes` and `message_bytes` of a spec; the default for what is absent or (with a fault noted) wrong."""
    sizes: dict[str, int] = {"bucket_bytes": bucket_bytes}
    for key in ("bucket_bytes", "message_bytes"):
        if key not in fields:
            continue
        value = fields.plain[key]
        if not is_whole(value):
            fields.fault(f"{value!r} is not a whole number of bytes", key)
            continue
        try:
            PlanOptions(**{key: value})
        except PlanError as fault:
            fields.fault(str(fault), key)
        else:
            sizes[key] = value
    return PlanOptions(**sizes)


def check_buckets(specs: Iterable[TensorSpec], options: PlanOptions, faults: FaultList) -> None:
    """Note every tensor that would be cut into so many buckets that planning would not end."""
    most = _MOST_BUCKETS * options.bucket_bytes
    for spec in specs:
        if spec.nbytes > most:
            faults.add(
                f"tensor {spec.name!r}.shape: {spec.nbytes} bytes are more than {_MOST_BUCKETS} buckets of "
                f"{options.bucket_bytes}; raise bucket_bytes"
            )


def faults_in(error: Exception) -> list[str]:
    """The faults that an error made by a FaultList lists, or the whole message of another one."""
    head, *listed = str(error).split("\n  - ")
    return listed or [head]
