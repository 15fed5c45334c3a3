"""Every figure of a plan's JSON, counted element by element from its definition, by other means than the planner's."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain, combinations, product
from math import prod

import pytest
from equipment.declaring import Refit
from equipment.random_refits import refits
from hypothesis import given, settings

from nemo_rl_reshard.layout import Region, TensorLayout
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.simulate.statistics import statistics, transfers_to_plain

Elements = set[tuple[int, ...]]


def elements(layout: TensorLayout) -> defaultdict[int, Elements]:
    """Rank -> coordinates of what it holds or needs."""
    found: defaultdict[int, Elements] = defaultdict(set)
    for rank, regions in layout.held:
        for region in regions:
            found[rank].update(product(*(range(a, b) for a, b in zip(region.offset, region.stop, strict=True))))
    return found


class Counted:
    """The figures of one refit. Bytes in the wire dtype."""

    def __init__(self, found: Refit) -> None:
        sources, targets = found.source.ranks, found.target.ranks
        domain_of = found.topology.domains_with({*sources, *targets})
        self.unique = self.gather_broadcast = 0
        self.holders: set[int] = set()
        self.needers: set[int] = set()
        entering: Counter[int] = Counter()
        leaving: Counter[int] = Counter()
        wanting: Counter[int] = Counter()
        self.free: Counter[frozenset[int]] = Counter()
        for name, spec in found.target.specs.items():
            size = spec.item_size
            held, needed = elements(found.source.layouts[name]), elements(found.target.layouts[name])
            self.holders.update(rank for rank in sources if held[rank])
            self.needers.update(rank for rank in targets if needed[rank])
            self.unique += size * len(set().union(*needed.values()))
            self.gather_broadcast += sum(size * (spec.numel - len(held[rank])) for rank in sources)
            self.gather_broadcast += len(targets) * spec.nbytes
            for rank in targets:
                wanting[rank] += size * len(needed[rank] - held[rank])
            departing: set[tuple[int, tuple[int, ...]]] = set()
            for domain in {domain_of[rank] for rank in targets}:
                wanted = set().union(*(needed[rank] for rank in targets if domain_of[rank] == domain))
                here = set().union(*(held[rank] for rank in sources if domain_of[rank] == domain))
                entering[domain] += size * len(wanted - here)
                for element in wanted - here:
                    having = frozenset(rank for rank in sources if element in held[rank])
                    self.free[having] += size
                    if len(having) == 1:
                        departing.add((min(having), element))
            for rank, _ in departing:
                leaving[rank] += size
        self.floor = entering.total()
        network, fast = found.topology.network_bytes_per_s, found.topology.fast_bytes_per_s
        members = Counter(domain_of.values())
        self.floor_s = max(
            0.0,
            *(nbytes / (members[domain] * network) for domain, nbytes in entering.items()),
            *(nbytes / network for nbytes in leaving.values()),
            *(nbytes / (network + fast) for nbytes in wanting.values()),
        )

    def least_peak(self) -> float:
        """The largest crowd over its senders: what only ranks of a set can send, by the size of the set."""
        ranks = sorted(set().union(*self.free))
        sets = chain.from_iterable(combinations(ranks, count) for count in range(1, len(ranks) + 1))
        crowds = ((sum(n for having, n in self.free.items() if having <= {*each}), len(each)) for each in sets)
        return max((nbytes / count for nbytes, count in crowds), default=0.0)


def over_mean(loads: list[int]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


@settings(max_examples=80, deadline=None)
@given(refits())
def test_totals_floors_and_balance_of_direct_plans(found: Refit) -> None:
    told, counted = statistics(found.plan, found.source, found.target, found.topology), Counted(found)
    totals, balance = told["totals"], told["balance"]
    assert totals["unique_bytes"] == totals["direct_bytes"] == counted.unique
    assert totals["network_bytes"] == totals["network_bytes_floor"] == counted.floor
    assert totals["gather_broadcast_bytes"] == counted.gather_broadcast
    assert told["predicted"]["floor_seconds"] == pytest.approx(counted.floor_s, rel=1e-9)
    moved: dict[str, Counter[int]] = defaultdict(Counter)
    for transfer in found.plan.transfers():
        nbytes = transfer.region.numel * found.plan.specs[transfer.tensor].item_size
        moved[f"{transfer.link}_send"][transfer.src] += nbytes
        moved[f"{transfer.link}_recv"][transfer.dst] += nbytes
    for link in ("network", "fast", "local"):
        assert totals[f"{link}_bytes"] == moved[f"{link}_send"].total()
    for row in told["per_rank"]:
        figures = {key: moved[key][row["rank"]] for key in row if key not in ("rank", "pack_bytes")}
        packed = figures["network_send"] + figures["fast_send"]
        assert row == {"rank": row["rank"], **figures, "pack_bytes": packed}
    sent, received = moved["network_send"], moved["network_recv"]
    assert balance["max_network_send_over_mean"] == pytest.approx(over_mean([sent[r] for r in counted.holders]))
    assert balance["max_network_recv_over_mean"] == pytest.approx(over_mean([received[r] for r in counted.needers]))
    least = counted.least_peak()
    expected = max(sent.values()) / least if least else 1.0
    assert balance["max_network_send_over_optimum"] == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(refits(RoutePolicy.FFN))
def test_totals_of_plans_with_leftovers(found: Refit) -> None:
    told, counted = statistics(found.plan, found.source, found.target, found.topology), Counted(found)
    totals = told["totals"]
    assert totals["unique_bytes"] == totals["direct_bytes"] + totals["leftover_bytes"] == counted.unique
    assert totals["network_bytes_floor"] == counted.floor
    assert totals["gather_broadcast_bytes"] == counted.gather_broadcast
    plain = transfers_to_plain(found.plan)
    direct = sum(prod(each["extent"]) * found.plan.specs[each["tensor"]].item_size for each in plain)
    whole = sum(found.target.specs[leftover.tensor].nbytes for leftover in found.plan.leftovers)
    moved = totals["network_bytes"] + totals["fast_bytes"] + totals["local_bytes"]
    assert moved == direct + whole * len(found.target.ranks)
    told = statistics(
        make_plan(found.source, found.target, found.routes, found.topology, found.plan.options, broadcast=True),
        found.source,
        found.target,
        found.topology,
    )
    totals, conventional = told["totals"], whole * len(found.target.ranks)
    for leftover in found.plan.leftovers:
        spec, held = found.target.specs[leftover.tensor], elements(found.source.layouts[leftover.tensor])
        assert leftover.nbytes == spec.nbytes
        conventional += sum(spec.item_size * (spec.numel - len(held[rank])) for rank in found.source.ranks)
    assert totals["network_bytes"] + totals["fast_bytes"] + totals["local_bytes"] == direct + conventional
    for link in ("network", "fast"):
        for way in ("send", "recv"):
            assert sum(row[f"{link}_{way}"] for row in told["per_rank"]) == totals[f"{link}_bytes"]


def test_the_oracle_counts_a_known_case() -> None:
    """Two rows of two on rank 0, of which rank 1 needs one: counted by hand."""
    layout = TensorLayout.from_regions((2, 2), {0: [Region((0, 0), (2, 2))], 1: [Region((1, 0), (1, 2))]})
    assert elements(layout) == {0: {(0, 0), (0, 1), (1, 0), (1, 1)}, 1: {(1, 0), (1, 1)}}
