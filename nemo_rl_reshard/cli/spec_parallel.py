"""The `source:` and `target:` of a spec by model: a backend and its parallel sizes, which multiply to `world`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

from nemo_rl_reshard.cli.spec_fields import Fields, is_whole, nearest
from nemo_rl_reshard.errors import FaultList

LARGEST_WORLD = 1 << 16


@dataclass(frozen=True, slots=True)
class Backend:
    """`axes` multiply to the world; `rest`, one of them, is what is left of it when the spec does not give it.

    `other` sizes cut the same ranks once more (experts), and multiply to nothing. `lists` and `numbers` are no sizes.
    """

    axes: tuple[str, ...]
    rest: str
    other: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key of a side with this backend."""
        return ("backend", "world", *self.axes, *self.other, *self.lists, *self.numbers)


SOURCES: Mapping[str, Backend] = MappingProxyType(
    {
        "megatron": Backend(("tp", "cp", "dp", "pp"), "dp", ("ep", "etp"), ("stages",), ("vocab_multiple",)),
        "fsdp2": Backend(("dp_replicate", "dp_shard", "tp"), "dp_shard", ("ep",)),
    }
)
TARGETS: Mapping[str, Backend] = MappingProxyType({"vllm": Backend(("tp", "pp", "dp"), "dp", ("ep",))})


@dataclass(frozen=True)
class ParallelSide:
    """One side: its backend, how many ranks, and every size that was given or follows from those."""

    backend: str
    world: int
    sizes: Mapping[str, int]
    stages: tuple[int, ...] | None = None
    vocab_multiple: int | None = None

    @property
    def text(self) -> str:
        """Like `megatron pp16 ep16 on 256 ranks`; sizes of 1 go without saying, unless all are."""
        named = [f"{key}{size}" for key, size in self.sizes.items() if size > 1] or ["tp1"]
        uneven = ["uneven stages"] if self.stages else []
        return " ".join([self.backend, *named, *uneven, "on", str(self.world), "ranks" if self.world > 1 else "rank"])


def read_parallel(plain: Any, key: str, backends: Mapping[str, Backend], faults: FaultList) -> ParallelSide | None:
    """One side of a spec by model; None, with every fault noted, if it is not in order.

    What the model has a say in (experts per rank, heads, layers) is checked where the model is laid out.
    """
    if not isinstance(plain, dict):
        faults.add(f"{key}: must be a mapping with backend, world and parallel sizes; got {plain!r}")
        return None
    name = plain.get("backend")
    backend = backends.get(name) if isinstance(name, str) else None
    known = backend.keys if backend else [each for other in backends.values() for each in other.keys]
    before = len(faults)
    fields = Fields(plain, key, faults, dict.fromkeys(known))
    if backend is None and not fields.lacks("backend", " or ".join(backends)):
        fields.fault(f"unknown backend {name!r}; {nearest(str(name), backends)}", "backend")
    world = None
    if not fields.lacks("world", "the number of ranks of this side"):
        world = _read_size(fields, "world", LARGEST_WORLD)
    given = {each: _read_size(fields, each, LARGEST_WORLD) for each in known if each in fields and each in _SIZES}
    stages = None
    if "stages" in fields:
        stages = fields.whole_numbers("stages", "a list of whole numbers, the layers of each pipeline stage")
    vocab_multiple = _read_size(fields, "vocab_multiple", LARGEST_WORLD) if "vocab_multiple" in fields else None
    if backend is None or world is None or len(faults) > before:
        return None
    sizes = {each: size for each, size in given.items() if size is not None}
    product = prod(sizes.get(axis, 1) for axis in backend.axes)
    if product != world if backend.rest in sizes else world % product:
        written = " x ".join(f"{axis} {sizes[axis]}" for axis in backend.axes if axis in sizes)
        verb = "does not make" if backend.rest in sizes else "does not divide"
        fields.fault(f"{written}{f' = {product}' if ' x ' in written else ''} {verb} {world} ranks", "world")
        return None
    sizes.setdefault(backend.rest, world // product)
    ordered = {each: sizes[each] for each in (*backend.axes, *backend.other) if each in sizes}
    return ParallelSide(str(name), world, ordered, stages, vocab_multiple)


_SIZES = frozenset(
    size for backend in (*SOURCES.values(), *TARGETS.values()) for size in (*backend.axes, *backend.other)
)


def _read_size(fields: Fields, key: str, most: int) -> int | None:
    value = fields.plain[key]
    if is_whole(value) and 1 <= value <= most:
        return value
    fields.fault(f"{value!r} is not a whole number between 1 and {most}", key)
    return None
