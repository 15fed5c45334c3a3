"""Plans and programs as plain JSON types and back, and the digest that seals a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, replace
from hashlib import sha256
from typing import Any

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import Move, Placed, Plan, PlanOptions, Template
from nemo_rl_reshard.plan.transfer import Leftover, Message, Part, RankProgram
from nemo_rl_reshard.topology import Link

Plain = dict[str, Any]
_SCHEMA = 2
_LINKS = tuple(Link)
_NUMBER_OF = {link: index for index, link in enumerate(_LINKS)}


def seal(plan: Plan) -> Plan:
    """The same plan with its digest: the sha256 of a JSON text that holds every field."""
    content = [
        _SCHEMA,
        astuple(plan.options),
        plan.sources,
        plan.targets,
        [(spec.name, spec.shape, spec.dtype) for spec in plan.specs.values()],
        [
            (template.shape, template.item_size, [astuple(piece) for piece in template.pieces], template.variants)
            for template in plan.templates
        ],
        plan.crews,
        plan.placed,
        [(leftover.tensor, leftover.nbytes, leftover.reason) for leftover in plan.leftovers],
        list(plan.skipped.items()),
    ]
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return replace(plan, digest=sha256(text.encode("ascii")).hexdigest())


def plan_to_plain(plan: Plan) -> Plain:
    """JSON types only. Inverse of `plan_from_plain`."""
    return {
        "schema": _SCHEMA,
        "digest": plan.digest,
        "options": {"bucket_bytes": plan.options.bucket_bytes, "message_bytes": plan.options.message_bytes},
        "sources": list(plan.sources),
        "targets": list(plan.targets),
        "specs": [[spec.name, list(spec.shape), spec.dtype] for spec in plan.specs.values()],
        "templates": [
            {
                "shape": list(template.shape),
                "item_size": template.item_size,
                "pieces": [_region_to_plain(region) for region in template.pieces],
                "variants": [
                    [[piece, src, dst, _NUMBER_OF[link], lag] for piece, src, dst, link, lag in moves]
                    for moves in template.variants
                ],
            }
            for template in plan.templates
        ],
        "crews": [list(crew) for crew in plan.crews],
        "placed": [list(row) for row in plan.placed],
        "leftovers": [[leftover.tensor, leftover.nbytes, leftover.reason] for leftover in plan.leftovers],
        "skipped": [list(pair) for pair in plan.skipped.items()],
    }


def plan_from_plain(plain: Mapping[str, Any]) -> Plan:
    """Read what `plan_to_plain` wrote. Raises PlanError if it is malformed or its digest does not fit."""
    try:
        plan = Plan(
            options=PlanOptions(**plain["options"]),
            specs={name: TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in plain["specs"]},
            templates=tuple(
                Template(
                    tuple(template["shape"]),
                    template["item_size"],
                    tuple(_region_from_plain(region) for region in template["pieces"]),
                    tuple(
                        tuple(Move(piece, src, dst, _LINKS[link], lag) for piece, src, dst, link, lag in moves)
                        for moves in template["variants"]
                    ),
                )
                for template in plain["templates"]
            ),
            crews=tuple(tuple(crew) for crew in plain["crews"]),
            placed=tuple(Placed(*row) for row in plain["placed"]),
            leftovers=tuple(Leftover(*row) for row in plain["leftovers"]),
            skipped=dict(plain["skipped"]),
            sources=tuple(plain["sources"]),
            targets=tuple(plain["targets"]),
        )
        said = plain["digest"]
    except (KeyError, TypeError, ValueError, IndexError) as fault:
        raise PlanError(f"malformed plan: {fault!r}") from fault
    sealed = seal(plan)
    if sealed.digest != said:
        raise PlanError(f"plan says digest {said}, its content has {sealed.digest}: it was changed on the way")
    return sealed


def program_to_plain(program: RankProgram) -> Plain:
    """JSON types only. Inverse of `program_from_plain`."""
    return {
        "rank": program.rank,
        "digest": program.digest,
        "messages": [
            [
                message.order,
                message.step,
                message.src,
                message.dst,
                str(message.link),
                [[part.tensor, _region_to_plain(part.region), part.dtype, part.nbytes] for part in message.parts],
            ]
            for message in program.messages
        ],
        "leftovers": [[spec.name, list(spec.shape), spec.dtype] for spec in program.leftovers],
        "message_bytes": program.message_bytes,
    }


def program_from_plain(plain: Mapping[str, Any]) -> RankProgram:
    """Read what `program_to_plain` wrote. Raises PlanError if it is malformed."""
    try:
        return RankProgram(
            rank=plain["rank"],
            digest=plain["digest"],
            messages=tuple(
                Message(
                    order,
                    step,
                    src,
                    dst,
                    Link(link),
                    tuple(
                        Part(tensor, _region_from_plain(region), dtype, nbytes)
                        for tensor, region, dtype, nbytes in parts
                    ),
                )
                for order, step, src, dst, link, parts in plain["messages"]
            ),
            leftovers=tuple(TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in plain["leftovers"]),
            message_bytes=plain["message_bytes"],
        )
    except (KeyError, TypeError, ValueError) as fault:
        raise PlanError(f"malformed program: {fault!r}") from fault


def _region_to_plain(region: Region) -> list[list[int]]:
    return [list(region.offset), list(region.extent)]


def _region_from_plain(plain: list[list[int]]) -> Region:
    offset, extent = plain
    return Region(tuple(offset), tuple(extent))
