"""Parallel sizes against a model: counts of its layers and experts, and checks that note faults and raise none."""

from __future__ import annotations

from math import prod

from nemo_rl_reshard.errors import FaultList
from nemo_rl_reshard.virtual.roles import Placed


def are_positive(faults: FaultList, **sizes: int) -> bool:
    """True when every size is at least 1; notes those that are not."""
    wrong = {name: size for name, size in sizes.items() if size < 1}
    for name, size in wrong.items():
        faults.add(f"{name} {size}: must be at least 1")
    return not wrong


def note_unequal(faults: FaultList, world: int, **sizes: int) -> None:
    """Note that `world` is not the product of the sizes that fill it."""
    if prod(sizes.values()) != world:
        factors = " * ".join(f"{name} {size}" for name, size in sizes.items())
        faults.add(f"world {world}: is not {factors} = {prod(sizes.values())}; change one of them")


def note_remainder(faults: FaultList, name: str, size: int, what: str, total: int) -> None:
    """Note that `size` does not divide `total` of something."""
    if total % size:
        faults.add(f"{name} {size}: does not divide {what} {total}")


def num_layers(placed: Placed) -> int:
    """Layers of a model, counted by the names of its tensors."""
    return 1 + max((place.layer for place, _ in placed if place.layer is not None), default=-1)


def num_experts(placed: Placed) -> int:
    """Routed experts of a layer, counted by the names of the tensors; 0 for a dense model."""
    return 1 + max((place.expert for place, _ in placed if place.expert is not None), default=-1)
