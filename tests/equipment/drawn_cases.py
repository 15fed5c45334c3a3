"""Plan cases drawn by a seed: any mesh and placement, up to 24 ranks, several tensors, replicas in many domains."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from random import Random

from equipment.plan_case import Box, Boxes, Grid, Held, PlanCase, TensorPair

NUM_SMALL = 140  # worlds of at most LARGEST_SMALL ranks: these also run between processes
NUM_WIDE = 100
LARGEST_SMALL = 8
_LARGEST = 24
_SIZES = (1, 2, 3, 4, 5, 7, 8, 12)
_NAMES = ("up_proj", "down_proj", "experts.0.gate_proj", "experts.3.down_proj")
_DTYPES = (("float32", None), ("bfloat16", None), ("bfloat16", "float32"), ("float64", None), ("uint8", None))


def drawn_case(seed: int) -> PlanCase:
    """Case number `seed`: equal on every machine, small below NUM_SMALL and wide from there on."""
    draw = Random(seed)
    most = LARGEST_SMALL if seed < NUM_SMALL else _LARGEST
    least = 2 if seed < NUM_SMALL else LARGEST_SMALL + 1
    num_ranks = draw.randint(least, most)
    num_sources = draw.choice([1, 2, draw.randint(1, num_ranks - 1)])  # few trainers make relays pay
    num_sources = min(num_sources, num_ranks - 1)
    numbers = draw.sample(range(3 * num_ranks), num_ranks) if draw.random() < 0.2 else list(range(num_ranks))
    sources, targets = numbers[:num_sources], numbers[num_sources:]
    if draw.random() < 0.2:
        targets = targets + draw.sample(sources, draw.randint(1, num_sources))  # some trainers are engines too
    num_engines = draw.choice([n for n in range(1, len(targets) + 1) if len(targets) % n == 0])
    tensors = []
    for layer in range(draw.randint(1, 4)):
        shape = _shape(draw)
        held = _source(draw, shape, sources)
        needed = _target(draw, shape, targets, num_engines)
        dtype, source_dtype = draw.choice(_DTYPES)
        tensors += [
            TensorPair(f"model.layers.{layer}.mlp.{name}.weight", shape, held, needed, dtype, source_dtype)
            for name in draw.sample(_NAMES, draw.randint(1, 2))
        ]
    domains = _domains(draw, sources, targets, len(targets) // num_engines)
    bucket, message = draw.choice([8, 64, 200, 1 << 20]), draw.choice([8, 48, 1 << 20])
    idle = tuple(rank for rank in targets if not any(rank in pair.target.ranks for pair in tensors))
    return PlanCase(f"drawn_{seed:03}", "drawn", tuple(tensors), domains, bucket, message, idle=idle)


def small_cases() -> list[PlanCase]:
    """Those that fit LARGEST_SMALL ranks."""
    return [drawn_case(seed) for seed in range(NUM_SMALL)]


def wide_cases() -> list[PlanCase]:
    """Those that do not."""
    return [drawn_case(seed) for seed in range(NUM_SMALL, NUM_SMALL + NUM_WIDE)]


def _shape(draw: Random) -> tuple[int, ...]:
    return tuple(draw.choice(_SIZES) for _ in range(draw.choice([0, 1, 2, 2, 2, 3])))


def _source(draw: Random, shape: tuple[int, ...], ranks: Sequence[int]) -> Held:
    """A mesh over all trainers, over some of them as a pipeline stage is, or the whole tensor on each of a few."""
    kind = draw.random()
    some = draw.sample(ranks, draw.randint(1, len(ranks)))
    if kind < 0.6:
        return _grid(draw, shape, draw.sample(ranks, len(ranks)))
    if kind < 0.8:
        return _grid(draw, shape, some)
    return Boxes(tuple((rank, (((0,) * len(shape), shape),)) for rank in sorted(some)))


def _target(draw: Random, shape: tuple[int, ...], ranks: Sequence[int], num_engines: int) -> Held:
    """Equal engines over consecutive ranks, any mesh, or boxes that no mesh describes."""
    kind = draw.random()
    if kind < 0.5:
        inner = _grid(draw, shape, ranks[: len(ranks) // num_engines])
        return Grid((num_engines, *inner.mesh), f"R {inner.placements}", tuple(ranks))
    if kind < 0.75:
        return _grid(draw, shape, draw.sample(ranks, len(ranks)))
    return Boxes(
        tuple((rank, _boxes(draw, shape)) for rank in ranks if draw.random() < 0.8) or ((ranks[0], _all(shape)),)
    )


def _all(shape: tuple[int, ...]) -> tuple[Box, ...]:
    return (((0,) * len(shape), shape),)


def _boxes(draw: Random, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """One box anywhere, or two that touch."""
    offset = tuple(draw.randrange(size) for size in shape)
    extent = tuple(draw.randint(1, size - start) for size, start in zip(shape, offset, strict=True))
    if not shape or extent[0] == 1 or draw.random() < 0.5:
        return ((offset, extent),)
    first = draw.randint(1, extent[0] - 1)
    below = (offset[0] + first, *offset[1:])
    return ((offset, (first, *extent[1:])), (below, (extent[0] - first, *extent[1:])))


def _grid(draw: Random, shape: tuple[int, ...], ranks: Sequence[int]) -> Grid:
    """A mesh of one to three axes with any placements that fit it."""
    left, mesh = len(ranks), []
    while left > 1 and len(mesh) < 2:
        mesh.append(draw.choice([n for n in range(1, left + 1) if left % n == 0]))
        left //= mesh[-1]
    mesh.append(left)
    rules: list[tuple[str, int | None]] = []  # from the last axis to the first, with the dim that each cuts
    for axis in reversed(range(len(mesh))):
        dim = draw.randrange(len(shape)) if shape and draw.random() < 0.75 else None
        if dim is None:
            rules.insert(0, ("R", None))
        elif draw.random() < 0.6:
            rules.insert(0, (f"S({dim})", dim))
        else:
            later = [mesh[axis + 1 + at] for at, (_, cut) in enumerate(rules) if cut == dim and mesh[axis + 1 + at] > 1]
            rules.insert(0, (f"SS({dim},{prod(later) if later else draw.choice([2, 3])})", dim))
    return Grid(tuple(mesh), " ".join(text for text, _ in rules), tuple(ranks))


def _domains(
    draw: Random, sources: Sequence[int], targets: Sequence[int], per_engine: int
) -> tuple[tuple[int, ...], ...]:
    """A domain per engine, hosts that hold both sides, one for all, or none."""
    kind = draw.choice(["engines", "engines", "hosts", "all", "none"])
    if kind == "none":
        return ()
    everyone = list(dict.fromkeys([*sources, *targets]))
    if kind == "all":
        return (tuple(everyone),)
    if kind == "hosts":
        draw.shuffle(everyone)
        return _slices(everyone, draw.choice([2, 3, 4, 8]))
    apart = [rank for rank in targets if rank not in sources]
    return _slices(list(sources), draw.choice([1, 2, 4])) + _slices(apart, per_engine)


def _slices(ranks: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ranks[start : start + size]) for start in range(0, len(ranks), size))
