"""One rank of a refit spec made real: its memory, its session, its values before and its check after a refit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl_reshard.cli.position_code import position_code
from nemo_rl_reshard.errors import ReshardError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import Plan
from nemo_rl_reshard.runtime.assignment import Assignment
from nemo_rl_reshard.runtime.explicit import ExplicitSource, ExplicitTarget, Shards
from nemo_rl_reshard.runtime.handout import DEFAULT_IN_FLIGHT, hand_out
from nemo_rl_reshard.runtime.leftover_plan import Gather
from nemo_rl_reshard.runtime.session import RankSession
from nemo_rl_reshard.runtime.world import Join
from nemo_rl_reshard.transport.staging import wire_bytes

Regions = Mapping[str, tuple[Region, ...]]

_NAMED = 1000
"""Differing elements named one by one, per shard."""


@dataclass(frozen=True)
class ExplicitRank:
    """What one process needs to be rank `rank`, which the spec calls `label`. Holds no tensor, so it can travel.

    `holds` and `needs` give its regions as a trainer and as an inference rank; None where it is not one. `handout` is
    what its session adopts.
    """

    rank: int
    label: int
    num_trainers: int
    source_specs: tuple[TensorSpec, ...]
    target_specs: tuple[TensorSpec, ...]
    holds: Regions | None
    needs: Regions | None
    handout: Mapping[str, Any]

    @property
    def assignment(self) -> Assignment:
        """What the rank's session makes of the handout; lowered anew each time."""
        return Assignment.from_plain(self.handout, self.rank)


class LiveRank:
    """An ExplicitRank with memory and a session."""

    def __init__(self, made_of: ExplicitRank, join: Join) -> None:
        self.made_of = made_of
        self.source = self.target = None
        if made_of.holds is not None:
            self.source = ExplicitSource(made_of.source_specs, _memory(made_of.source_specs, made_of.holds))
        if made_of.needs is not None:
            self.target = ExplicitTarget(made_of.target_specs, _memory(made_of.target_specs, made_of.needs))
        self.session = RankSession(made_of.rank, source=self.source, target=self.target, join=join)
        if self.source is not None:
            self.session.declare()
        if self.target is not None:
            self.session.declare([[spec.name, list(spec.shape), spec.dtype] for spec in made_of.source_specs])

    def fill(self, turn: int) -> None:
        """Give every element that this rank holds its code for `turn`, and overwrite what it needs with a pattern."""
        if self.source is not None:
            for number, spec in enumerate(self.made_of.source_specs):
                for region, values in self.source.shards.get(spec.name, ()):
                    values.copy_(position_code(number, spec.shape, region, spec.dtype, turn))
        if self.target is not None:
            for shards in self.target.shards.values():
                for _, values in shards:
                    values.reshape(-1).view(torch.uint8).fill_(0xA5)

    def differences(self, turn: int) -> tuple[list[str], int]:
        """A sentence for every element of the target that is not the trainers', and their number.

        Of one shard, the first thousand are named.
        """
        found: list[str] = []
        count = 0
        if self.target is None:
            return found, count
        numbered = {spec.name: (number, spec) for number, spec in enumerate(self.made_of.source_specs)}
        for spec in self.made_of.target_specs:
            number, held = numbered[spec.name]
            for region, values in self.target.shards.get(spec.name, ()):
                code = position_code(number, held.shape, region, held.dtype, turn)
                wanted = code.to(getattr(torch, spec.dtype))
                # Bytes, so that no two values count as equal that are not the same bits.
                differs = _bytes(values).ne(_bytes(wanted)).any(dim=-1).reshape(region.extent)
                places = differs.nonzero()
                count += len(places)
                for place in places[:_NAMED].tolist():
                    at = tuple(start + step for start, step in zip(region.offset, place, strict=True))
                    has, wants = values[tuple(place)].item(), wanted[tuple(place)].item()
                    found.append(f"{spec.name}: rank {self.made_of.label} has {has} at {at}, the trainers hold {wants}")
                if len(places) > _NAMED:
                    found.append(f"{spec.name}: rank {self.made_of.label}: {len(places) - _NAMED} more elements differ")
        return found, count


def explicit_ranks(
    source: Catalog,
    target: Catalog,
    plan: Plan,
    *,
    in_flight: int = DEFAULT_IN_FLIGHT,
    gather: Gather = Gather.EVERYWHERE,
    in_rounds: bool = False,
) -> tuple[ExplicitRank, ...]:
    """Every rank of `plan`, numbered 0, 1, ... in the order trainers, then the others; see `ExplicitRank.label`.

    Worlds whose transport goes `in_rounds` have to say so. Tensors that the plan skips are nobody's need: their values
    are not the trainers' afterwards.
    """
    moved = tuple(spec for name, spec in target.specs.items() if name in plan.specs)
    labels = [*source.ranks, *(rank for rank in target.ranks if rank not in source.ranks)]
    handout = hand_out(plan, source, in_flight=in_flight, gather=gather, in_rounds=in_rounds, labels=labels)
    return tuple(
        ExplicitRank(
            rank=rank,
            label=label,
            num_trainers=len(source.ranks),
            source_specs=tuple(source.specs.values()),
            target_specs=moved,
            holds=_regions(source, source.specs, label) if label in source.ranks else None,
            needs=_regions(target, plan.specs, label) if label in target.ranks else None,
            handout=handout.of_rank(rank),
        )
        for rank, label in enumerate(labels)
    )


def raise_first(results: Mapping[int, object]) -> None:
    """Raise what a rank failed with, if any did: one that did not merely wait for another, where there is one."""
    failures = [result for result in results.values() if isinstance(result, BaseException)]
    failures.sort(key=lambda failure: isinstance(failure, ReshardError) and "abort" in type(failure).__name__.lower())
    if failures:
        raise failures[0]


def _regions(catalog: Catalog, names: Iterable[str], rank: int) -> dict[str, tuple[Region, ...]]:
    return {name: found for name in names if (found := catalog.layouts[name].regions_of(rank))}


def _memory(specs: tuple[TensorSpec, ...], regions: Regions) -> Shards:
    dtypes = {spec.name: getattr(torch, spec.dtype) for spec in specs}
    return {
        name: [(region, torch.zeros(region.extent, dtype=dtypes[name])) for region in held]
        for name, held in regions.items()
    }


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of each element along a last dim of their own."""
    return wire_bytes(values.contiguous()).view(-1, values.element_size())
