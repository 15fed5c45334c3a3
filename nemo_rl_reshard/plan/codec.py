"""Plans as the text that travels to the ranks and back, and the digest of that text, which seals a plan."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from hashlib import sha256
from typing import Any

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import Move, Placed, Plan, PlanOptions, Template
from nemo_rl_reshard.plan.transfer import Leftover
from nemo_rl_reshard.topology import Link

_SCHEMA = 2
_LINKS = {str(link): link for link in Link}


def seal(plan: Plan) -> Plan:
    """The same plan with its digest: that of its text."""
    return replace(plan, digest=digest_of(plan_to_text(plan)))


def digest_of(text: str) -> str:
    """The sha256 of a plan's text, in hexadecimal."""
    return sha256(text.encode("ascii")).hexdigest()


def plan_to_text(plan: Plan) -> str:
    """Every field of `plan` but its digest as one line of JSON, ASCII only; equal plans have equal texts."""
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
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True)


def plan_from_text(text: str, digest: str) -> Plan:
    """Read what `plan_to_text` wrote. Raises PlanError if `digest` is not that of `text`, or the text is no plan."""
    try:
        found = digest_of(text)
    except UnicodeEncodeError as fault:
        raise PlanError(f"malformed plan: {fault}") from fault
    if found != digest:
        raise PlanError(f"the plan should have digest {digest} and has {found}: it was changed on the way")
    try:
        schema, *content = json.loads(text)
        if schema != _SCHEMA:
            raise PlanError(f"the plan is of schema {schema}, this package reads {_SCHEMA}: use one version everywhere")
        options, sources, targets, specs, templates, crews, placed, leftovers, skipped = content
        return Plan(
            options=PlanOptions(*options),
            specs={name: TensorSpec(name, tuple(shape), dtype) for name, shape, dtype in specs},
            templates=tuple(_template(*template) for template in templates),
            crews=tuple(tuple(crew) for crew in crews),
            placed=tuple(Placed(*row) for row in placed),
            leftovers=tuple(Leftover(*row) for row in leftovers),
            skipped=dict(skipped),
            sources=tuple(sources),
            targets=tuple(targets),
            digest=digest,
        )
    except (KeyError, TypeError, ValueError, IndexError) as fault:
        raise PlanError(f"malformed plan: {fault!r}") from fault


def _template(shape: Any, item_size: int, pieces: Any, variants: Any) -> Template:
    return Template(
        shape=tuple(shape),
        item_size=item_size,
        pieces=tuple(Region(tuple(offset), tuple(extent)) for offset, extent in pieces),
        variants=tuple(
            tuple(Move(piece, src, dst, _LINKS[link], lag) for piece, src, dst, link, lag in moves)
            for moves in variants
        ),
    )
