"""Proof of a plan against the declarations it was made from, by other means than those that made it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from nemo_rl_reshard.errors import FaultList, PlanError
from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.layout.tiling import gaps, overlaps
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.routing import Route, RouteKind
from nemo_rl_reshard.plan.codec import seal
from nemo_rl_reshard.plan.kinds import needed_whole
from nemo_rl_reshard.plan.plan import Crew, Move, Plan, Template
from nemo_rl_reshard.plan.proof import Counting, Views
from nemo_rl_reshard.plan.step_loads import inbound
from nemo_rl_reshard.plan.transfer import Message, RankProgram
from nemo_rl_reshard.topology import Link, Topology

_LISTED = 50  # faults of one kind that are written out


def check_plan(
    plan: Plan, source: Catalog, target: Catalog, routes: Mapping[str, Route], topology: Topology | None = None
) -> None:
    """Raise PlanError listing every fault of a plan: digest, routes, cover, senders, times, links, buckets.

    Proven: every element that a target rank needs of a direct tensor, and every element of a leftover that is placed,
    arrives there exactly once, from a rank that held it at the start or received it in an earlier step; every other
    tensor is a leftover or skipped, as routed.
    Tensors whose crews hold and need alike, role by role, are proven once.
    """
    faults = FaultList("checking plan", PlanError)
    if seal(plan).digest != plan.digest:
        faults.add(f"digest {plan.digest!r} is not that of the content")
    _check_routes(plan, routes, faults)
    domain_of = topology.domains_with(plan.ranks) if topology else None
    views = Views(domain_of)
    counting = [Counting(template) for template in plan.templates]
    found: dict[tuple[int, int, int, int, int], list[str]] = {}
    proven: set[tuple[int, int, object]] = set()
    left = {leftover.tensor for leftover in plan.leftovers}
    whole: dict[tuple[int, ...], TensorLayout] = {}
    views_of: dict[tuple[int, int, int], object] = {}
    for row in plan.placed:
        name = row.tensor
        spec = target.specs.get(name)
        template = plan.templates[row.template]
        if spec is None or name not in source.layouts:
            faults.add(f"{name}: is in the plan, and not declared by both sides")
            continue
        if plan.specs.get(name) != spec or (template.shape, template.item_size) != (spec.shape, spec.item_size):
            faults.add(f"{name}: the plan moves {plan.specs.get(name)}, inference declares {spec}")
        given, wanted = source.layouts[name], target.layouts[name]
        if name in left or not wanted.held:
            if spec.shape not in whole:
                whole[spec.shape] = needed_whole(spec.shape, target.ranks)
            wanted = whole[spec.shape]
        case = (row.template, row.variant, row.crew, id(given), id(wanted))
        if case not in found:
            crew, moves = plan.crews[row.crew], template.variants[row.variant]
            who = (row.crew, id(given), id(wanted))
            if who not in views_of:
                views_of[who] = views.of(crew, given, wanted)
            alike = (row.template, row.variant, views_of[who])
            found[case] = []
            if alike not in proven:
                if not counting[row.template].proves(moves, crew, given, wanted, domain_of):
                    found[case] = list(_faults_of(template, moves, crew, given, wanted, domain_of))
                if not found[case]:
                    proven.add(alike)
        faults.extend(f"{name}: {fault}" for fault in found[case][:_LISTED])
    _check_buckets(plan, faults)
    faults.raise_if_any()


def check_programs(programs: Sequence[RankProgram]) -> None:
    """Raise PlanError unless every message is in the programs of both its ranks, alike and in ascending order."""
    faults = FaultList("checking programs", PlanError)
    digests = sorted({program.digest for program in programs})
    if len(digests) > 1:
        faults.add(f"programs come from different plans: digests {digests}")
    seen: defaultdict[int, list[tuple[int, Message]]] = defaultdict(list)
    for program in programs:
        orders = [message.order for message in program.messages]
        if any(after <= before for before, after in pairwise(orders)):
            faults.add(f"rank {program.rank}: messages are not in ascending order")
        for message in program.messages:
            seen[message.order].append((program.rank, message))
            if message.nbytes > program.message_bytes:
                faults.add(
                    f"rank {program.rank}: message {message.order} of {message.nbytes} bytes passes the limit "
                    f"{program.message_bytes}"
                )
    for order, found in sorted(seen.items()):
        message = found[0][1]
        have = sorted(rank for rank, _ in found)
        if have != sorted({message.src, message.dst}) or any(other != message for _, other in found):
            faults.add(
                f"message {order} from rank {message.src} to rank {message.dst} is known, with its content, to ranks "
                f"{have} only or differs between them"
            )
    faults.raise_if_any()


def _check_routes(plan: Plan, routes: Mapping[str, Route], faults: FaultList) -> None:
    """Every tensor goes once, and goes the way it is routed."""
    left = {leftover.tensor for leftover in plan.leftovers}
    twice = Counter(row.tensor for row in plan.placed if row.tensor in left)
    faults.extend(f"{name}: {count} times placed" for name, count in sorted(twice.items()) if count > 1)
    went = {
        RouteKind.DIRECT: Counter(row.tensor for row in plan.placed if row.tensor not in left),
        RouteKind.LEFTOVER: Counter(leftover.tensor for leftover in plan.leftovers),
        RouteKind.SKIP: Counter(plan.skipped.keys()),
    }
    for kind, names in went.items():
        routed = {name for name, route in routes.items() if route.kind is kind}
        faults.extend(f"{name}: routed {kind}, the plan does not move it so" for name in sorted(routed - names.keys()))
        faults.extend(
            f"{name}: the plan calls it {kind}, it is not routed so" for name in sorted(names.keys() - routed)
        )
        faults.extend(f"{name}: {count} times {kind}" for name, count in sorted(names.items()) if count > 1)


def _faults_of(
    template: Template,
    moves: Sequence[Move],
    crew: Crew,
    given: TensorLayout,
    wanted: TensorLayout,
    domain_of: Mapping[int, int] | None,
) -> Iterable[str]:
    """What is wrong with the moves of one tensor."""
    if len(set(crew)) != len(crew):
        yield f"crew {crew} gives two roles to one rank"
        return
    held = dict(given.held)
    needed = dict(wanted.held)
    arrivals: defaultdict[int, list[tuple[int, Region]]] = defaultdict(list)
    for move in moves:
        arrivals[crew[move.dst]].append((move.lag, template.pieces[move.piece]))
    for move in moves:
        region = template.pieces[move.piece]
        src, dst = crew[move.src], crew[move.dst]
        text = f"transfer of offset {region.offset} extent {region.extent} from rank {src} to rank {dst}"
        if (src == dst) != (move.link is Link.LOCAL):
            yield f"{text} is called {move.link}"
        elif domain_of and src != dst:
            link = Link.FAST if domain_of[src] == domain_of[dst] else Link.NETWORK
            if link is not move.link:
                yield f"{text} is called {move.link}, the topology says {link}"
        if not any(part.contains(region) for part in held.get(src, ())):
            earlier = [part for lag, part in arrivals.get(src, ()) if lag < move.lag]
            if gaps(region, earlier):
                yield f"{text} is sent before its sender has it"
            if not any(part.contains(region) for part in needed.get(src, ())):
                yield f"{text} is no part of one region of its sender"
        if not any(part.contains(region) for part in needed.get(dst, ())):
            yield f"{text} is no part of one region that its receiver needs"
    for rank in sorted({*needed, *arrivals}):
        got = [region for _, region in arrivals.get(rank, ())]
        for region in overlaps(got):
            yield f"rank {rank} receives offset {region.offset} extent {region.extent} more than once"
        for part in needed.get(rank, ()):
            for region in gaps(part, [found for found in got if part.intersect(found)]):
                yield f"rank {rank} needs offset {region.offset} extent {region.extent}, which never arrives"


def _check_buckets(plan: Plan, faults: FaultList) -> None:
    """No rank receives more than a bucket in a step; local copies need none."""
    received, ranks = inbound(plan), plan.ranks
    faults.extend(
        f"rank {ranks[column]} receives {received[step, column]} bytes in step {step}, the bucket holds "
        f"{plan.options.bucket_bytes}"
        for step, column in np.argwhere(received > plan.options.bucket_bytes).tolist()
    )
