"""Steps: bounded inbound bytes, model order, forwards later, exchange beside the network."""

from collections import defaultdict

import pytest
from equipment.declaring import layout, one_tensor, refit
from equipment.plan_runs import assert_delivered

from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.topology import Link, Topology


def inbound(plan):
    total = defaultdict(int)
    for transfer in plan.transfers():
        if transfer.link is not Link.LOCAL:
            total[transfer.dst, transfer.step] += transfer.region.numel * plan.specs[transfer.tensor].item_size
    return total


def many(count, bucket, topology=None):
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (8, 4), "float32") for i in range(count)]
    given, wanted = layout((8, 4), (2,), "S(0)", (0, 1)), layout((8, 4), (2, 2), "R S(0)", (2, 3, 4, 5))
    tensors = [(spec, given, wanted) for spec in specs]
    return refit(tensors, (0, 1), (2, 3, 4, 5), topology, PlanOptions(bucket_bytes=bucket))


@pytest.mark.parametrize("bucket", [8, 16, 64, 128, 200, 1000])
@pytest.mark.parametrize("domains", [(), ((2, 3, 4, 5),), ((2, 4), (3, 5))])
def test_no_rank_receives_more_than_a_bucket_in_a_step(bucket, domains):
    found = many(7, bucket, Topology(domains=domains))
    assert max(inbound(found.plan).values()) <= bucket
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    assert_delivered(found)


def test_every_rank_finishes_tensors_in_model_order_but_for_one_step_of_forwards():
    found = many(9, 128, Topology(domains=((2, 3, 4, 5),)))
    last = defaultdict(dict)
    for transfer in found.plan.transfers():
        last[transfer.dst][transfer.tensor] = max(last[transfer.dst].get(transfer.tensor, 0), transfer.step)
    for finished in last.values():
        steps = list(finished.values())
        assert len(steps) == 9
        assert all(step + 1 >= max(steps[: index + 1]) for index, step in enumerate(steps))


def test_the_exchange_runs_beside_the_network_in_the_same_steps():
    found = many(20, 256, Topology(domains=((2, 3, 4, 5),)))
    steps = defaultdict(set)
    for transfer in found.plan.transfers():
        steps[transfer.step].add(transfer.link)
    assert found.plan.num_steps > 4
    assert all(steps[step] == {Link.NETWORK, Link.FAST} for step in range(1, found.plan.num_steps - 1))


def test_a_tensor_larger_than_a_bucket_takes_several_steps():
    topology = Topology(domains=((1, 2),))
    found = one_tensor((10, 4), ((1,), "R", (0,)), ((2,), "R", (1, 2)), topology, PlanOptions(bucket_bytes=40))
    assert max(inbound(found.plan).values()) <= 40
    assert found.plan.num_steps > 1
    check_plan(found.plan, found.source, found.target, found.routes, found.topology)
    assert_delivered(found)


def test_one_step_is_enough_when_all_fits():
    assert many(7, 1 << 20, Topology(domains=(tuple(range(6)),))).plan.num_steps == 1
