"""The event clock, by cases that can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from equipment.declaring import GATE, layout, one_tensor, refit
from equipment.plain_links import GB, PLAIN

from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.step_loads import StepLoads
from nemo_rl_reshard.plan.transfer import Leftover
from nemo_rl_reshard.simulate.clock import simulate_plan
from nemo_rl_reshard.simulate.recurrence import run_clock
from nemo_rl_reshard.simulate.statistics import statistics
from nemo_rl_reshard.topology import Topology


def loads(num_ranks, steps):
    """StepLoads of `steps`, each a list of (src, dst, link, GB)."""
    arrays = {name: np.zeros((len(steps), num_ranks), dtype=np.int64) for name in StepLoads.__dataclass_fields__}
    del arrays["ranks"]
    for step, moves in enumerate(steps):
        for src, dst, link, size in moves:
            arrays[f"{link}_sent"][step, src] += int(size * GB)
            arrays[f"{link}_received"][step, dst] += int(size * GB)
            arrays["messages_sent"][step, src] += 1
            arrays["messages_received"][step, dst] += 1
    return StepLoads(ranks=tuple(range(num_ranks)), **arrays)


def seconds(num_ranks, steps, topology=PLAIN, **options):
    return run_clock(loads(num_ranks, steps), topology, **options).end_s


def test_one_message_takes_its_bytes_over_the_rate_and_a_latency():
    topology = replace(PLAIN, network_latency_s=0.25)
    assert seconds(2, [[(0, 1, "network", 3)]], topology) == pytest.approx(3 + 0.25)


def test_links_run_at_wire_efficiency():
    assert seconds(2, [[(0, 1, "network", 3)]], replace(PLAIN, wire_efficiency=0.75)) == pytest.approx(4)


def test_two_senders_share_their_receivers_nic():
    assert seconds(3, [[(0, 2, "network", 1), (1, 2, "network", 1)]]) == pytest.approx(2)


def test_two_receivers_share_their_senders_nic():
    assert seconds(3, [[(0, 1, "network", 1), (0, 2, "network", 1)]]) == pytest.approx(2)


def test_sending_and_receiving_do_not_share():
    assert seconds(3, [[(0, 1, "network", 1), (1, 2, "network", 1)]]) == pytest.approx(1)


@pytest.mark.parametrize(("ranks_per_nic", "expected"), [(1, 1.0), (2, 2.0)])
def test_a_nic_shared_by_two_ranks_doubles_the_time(ranks_per_nic, expected):
    topology = replace(PLAIN, domains=((0, 1), (2, 3)), ranks_per_nic=ranks_per_nic)
    assert seconds(4, [[(0, 2, "network", 1), (1, 3, "network", 1)]], topology) == pytest.approx(expected)


def test_a_shared_nic_is_all_its_busy_ranks():
    topology = replace(PLAIN, domains=((0, 1), (2, 3)), ranks_per_nic=2)
    assert seconds(4, [[(0, 2, "network", 1)]], topology) == pytest.approx(1)


def test_many_small_messages_cost_their_latencies_16_at_a_time():
    topology = replace(PLAIN, network_latency_s=1.0)
    assert seconds(2, [[(0, 1, "network", 1e-6)] * 64], topology) == pytest.approx(64 / 16 + 1)


def test_few_messages_hide_their_latency_behind_bytes():
    topology = replace(PLAIN, network_latency_s=1.0)
    assert seconds(2, [[(0, 1, "network", 1)] * 32], topology) == pytest.approx(32 + 1)


def test_fast_exchange_hides_behind_the_next_steps_network():
    topology = replace(PLAIN, domains=((0,), (1, 2)))
    steps = [[(0, 1, "network", 1)]]
    steps += [[(0, 1, "network", 1), (1, 2, "fast", 1)] for _ in range(4)]
    steps += [[(1, 2, "fast", 1)]]
    # Five steps of one second; of five exchanges of 0.1 s only the last has nothing to hide behind.
    assert seconds(3, steps, topology) == pytest.approx(5 + 0.1)


def test_a_forward_waits_for_what_it_forwards():
    topology = replace(PLAIN, domains=((0,), (1, 2)))
    steps = [[(0, 1, "network", 1)], [(1, 2, "fast", 1)]]
    clock = run_clock(loads(3, steps), topology)
    assert clock.fast_send.start[1, 1] == pytest.approx(1)


def test_a_relay_waits_for_what_it_relays():
    assert seconds(3, [[(0, 1, "network", 1)], [(1, 2, "network", 1)]]) == pytest.approx(2)


def test_pack_and_install_show_only_at_the_ends():
    topology = replace(PLAIN, memory_bytes_per_s=20 * GB)
    # Packing passes over a byte twice, installing three times: 0.1 and 0.15 s for each second of network.
    clock = run_clock(loads(2, [[(0, 1, "network", 1)]] * 5), topology)
    assert clock.end_s == pytest.approx(0.1 + 5 + 0.15)
    assert clock.first_wire_s == pytest.approx(0.1)


def test_slow_memory_is_what_a_refit_waits_for():
    topology = replace(PLAIN, memory_bytes_per_s=1 * GB)
    # Installing takes 3 s a step and packing 2 s; both run beside the network's 1 s, but for the ends.
    assert seconds(2, [[(0, 1, "network", 1)]] * 4, topology, window_steps=9) == pytest.approx(2 + 1 + 4 * 3)


def test_nobody_runs_ahead_of_the_slowest_by_more_than_the_window():
    steps = [[(0, 2, "network", 3), (1, 3, "network", 1)], *[[(1, 3, "network", 1)]] * 3]
    # The second pair's steps: 0-1, 1-2, then the first step's end at 3, and no barrier after that.
    assert seconds(4, steps, window_steps=2) == pytest.approx(5)
    assert seconds(4, steps, window_steps=9) == pytest.approx(4)
    assert seconds(4, steps, window_steps=1) == pytest.approx(6)


def test_nothing_to_move_takes_no_time():
    assert seconds(2, []) == 0
    assert seconds(2, [[]]) == 0


def drawn(seed):
    """A few random steps among two domains of two ranks, forwards after first hops."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(int(rng.integers(1, 6))):
        step = [(int(rng.integers(2)), int(rng.integers(2, 4)), "network", float(rng.integers(1, 4)))]
        if rng.integers(2):
            step.append((2, 3, "fast", float(rng.integers(1, 9))))
        steps.append(step)
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_more_bandwidth_never_costs_time(seed):
    slow = replace(PLAIN, domains=((0, 1), (2, 3)), network_latency_s=0.01, memory_bytes_per_s=9 * GB)
    base = seconds(4, drawn(seed), slow)
    for faster in (
        replace(slow, network_bytes_per_s=2 * GB),
        replace(slow, fast_bytes_per_s=20 * GB),
        replace(slow, memory_bytes_per_s=90 * GB),
        replace(slow, network_latency_s=0.0),
    ):
        assert seconds(4, drawn(seed), faster) <= base + 1e-12


CASES = [
    pytest.param(([2], "S(0)", [0, 1]), ([4], "S(1)", [2, 3, 4, 5]), ((0, 1), (2, 3, 4, 5)), id="rows to columns"),
    pytest.param(
        ([4], "S(0)", range(4)), ([2, 2], "R S(0)", range(4, 8)), ((0, 1, 2, 3), (4, 5, 6, 7)), id="TP4 to TP2"
    ),
    pytest.param(([2, 3], "R S(1)", range(6)), ([2], "S(0)", [6, 7]), (), id="uneven, no domains"),
    pytest.param(([3], "S(0)", range(3)), ([2], "R", [3, 4]), ((0, 1, 2, 3, 4),), id="all in one domain"),
]


@pytest.mark.parametrize(("source", "target", "domains"), CASES)
@pytest.mark.parametrize("ranks_per_nic", [1, 2])
def test_no_plan_beats_the_floor_at_full_wire_efficiency(source, target, domains, ranks_per_nic):
    topology = Topology(domains=domains, wire_efficiency=1.0, ranks_per_nic=ranks_per_nic)
    case = one_tensor((4096, 2400), source, target, topology, PlanOptions(bucket_bytes=1 << 22, message_bytes=1 << 18))
    floor = statistics(case.plan, case.source, case.target, topology)["predicted"]["floor_seconds"]
    found = simulate_plan(case.plan, case.source, case.target, topology)
    assert found.seconds >= floor
    assert sum(found.phases.values()) == pytest.approx(found.seconds)
    assert all(part >= 0 for part in found.phases.values())


def two_tensors(policy=RoutePolicy.ALL):
    """A projection and an attention weight, from two trainers to two engines' ranks."""
    shape = (1024, 1024)
    given, wanted = layout(shape, [2], "S(0)", [0, 1]), layout(shape, [2], "S(1)", [2, 3])
    names = (GATE, "model.layers.0.self_attn.o_proj.weight")
    tensors = [(TensorSpec(name, shape, "float32"), given, wanted) for name in names]
    return refit(tensors, [0, 1], [2, 3], PLAIN, PlanOptions(bucket_bytes=1 << 20), policy)


def test_leftovers_that_are_placed_cost_what_they_add_to_the_bulk():
    case = two_tensors()
    name = case.plan.placed[-1].tensor
    plan = replace(case.plan, leftovers=(Leftover(name, case.plan.specs[name].nbytes, "for the test"),))
    found = simulate_plan(plan, case.source, case.target, PLAIN)
    alone = replace(case.plan, placed=tuple(row for row in case.plan.placed if row.tensor != name))
    bulk = simulate_plan(alone, case.source, case.target, PLAIN)
    assert found.seconds == simulate_plan(case.plan, case.source, case.target, PLAIN).seconds
    assert found.phases["leftover"] == pytest.approx(found.seconds - bulk.seconds)
    assert found.phases["network"] == pytest.approx(bulk.phases["network"])


def test_a_fixed_cost_is_added_and_called_overhead():
    case = two_tensors()
    plain = simulate_plan(case.plan, case.source, case.target, PLAIN)
    found = simulate_plan(case.plan, case.source, case.target, PLAIN, overhead_s=0.5)
    assert found.seconds == pytest.approx(plain.seconds + 0.5)
    assert found.phases["overhead"] == 0.5


def test_the_timeline_holds_all_bytes_that_the_links_carry():
    case = two_tensors()
    found = simulate_plan(case.plan, case.source, case.target, PLAIN)
    series = {(row.link, row.group): row.busy for row in found.timeline.series}
    sent_s = 2 * 1024 * 1024 * 4 / 2 / GB  # both tensors, half on each of two NICs
    for name in (("network send", "trainers"), ("network receive", "inference")):
        assert series[name].sum() * found.timeline.bin_s == pytest.approx(sent_s)
        assert series[name].min() >= 0
        assert series[name].max() <= 1
