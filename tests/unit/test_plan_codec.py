"""Plans and programs as JSON: equal after a round trip, and refused when changed."""

import json

import pytest
from equipment.declaring import one_tensor

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.plan.codec import plan_from_plain, plan_to_plain, program_from_plain, program_to_plain
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.topology import Topology


def example():
    topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))
    options = PlanOptions(bucket_bytes=100, message_bytes=50)
    return one_tensor((10, 6), ((2, 2), "SS(0,2) S(0)", range(4)), ((2, 2), "R S(1)", range(4, 8)), topology, options)


def through_json(plain):
    return json.loads(json.dumps(plain))


def test_b70_plans_survive_json():
    plan = example().plan
    again = plan_from_plain(through_json(plan_to_plain(plan)))
    assert again == plan
    assert list(again.transfers()) == list(plan.transfers())


def test_b70_programs_survive_json():
    found = example()
    for rank in found.ranks:
        program = lower(found.plan, rank)
        assert program_from_plain(through_json(program_to_plain(program))) == program


def test_a_program_lowered_from_a_plan_that_travelled_is_equal():
    plan = example().plan
    assert lower(plan_from_plain(through_json(plan_to_plain(plan))), 5) == lower(plan, 5)


def test_a_plan_changed_on_the_way_is_refused():
    plain = through_json(plan_to_plain(example().plan))
    plain["templates"][0]["variants"][0][0][1] += 1
    with pytest.raises(PlanError, match="it was changed on the way"):
        plan_from_plain(plain)


@pytest.mark.parametrize("key", ["templates", "placed", "options", "specs", "digest"])
def test_malformed_plans_are_refused(key):
    plain = plan_to_plain(example().plan)
    del plain[key]
    with pytest.raises(PlanError, match="malformed plan"):
        plan_from_plain(plain)


def test_malformed_programs_are_refused():
    with pytest.raises(PlanError, match="malformed program"):
        program_from_plain({"rank": 0})
