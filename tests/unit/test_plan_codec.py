"""Plans and programs as JSON: equal after a round trip, and refused when changed."""

import copy
import json
from dataclasses import fields, replace

import pytest
from equipment.declaring import one_tensor

from nemo_rl_reshard.errors import PlanError, ReshardError
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.codec import plan_from_plain, plan_to_plain, program_from_plain, program_to_plain, seal
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.transfer import Leftover
from nemo_rl_reshard.topology import Topology


def example():
    topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))
    options = PlanOptions(bucket_bytes=100, message_bytes=50)
    return one_tensor((10, 6), ((2, 2), "SS(0,2) S(0)", range(4)), ((2, 2), "R S(1)", range(4, 8)), topology, options)


def full_example():
    """The example's plan with a leftover and a skipped tensor, so that no field is empty."""
    plan = example().plan
    leftover = TensorSpec("model.norm.weight", (6,), "float32")
    return seal(
        replace(
            plan,
            specs={**plan.specs, leftover.name: leftover},
            leftovers=(Leftover(leftover.name, leftover.nbytes, "norm"),),
            skipped={"mtp.norm.weight": "draft"},
        )
    )


def leaves(plain, path=()):
    """Path and value of everything in nested JSON that is no list or mapping."""
    if isinstance(plain, dict | list):
        for key, inner in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from leaves(inner, (*path, key))
    else:
        yield path, plain


def through_json(plain):
    return json.loads(json.dumps(plain))


def test_b70_plans_survive_json():
    plan = full_example()
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


def test_no_value_of_a_plan_can_change_without_its_digest():
    """`B09`: whatever is changed in the JSON, down to one offset of one piece, is refused."""
    plain = through_json(plan_to_plain(full_example()))
    paths = list(leaves(plain))
    assert {path[0] for path, _ in paths} == plain.keys()
    for path, value in paths:
        if path == ("schema",):
            continue
        changed = copy.deepcopy(plain)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = f"{value}x" if isinstance(value, str) else value + 1
        with pytest.raises(ReshardError):
            plan_from_plain(changed)


def test_every_field_of_a_plan_is_sealed():
    plan = full_example()
    for field in fields(plan):
        if field.name != "digest":
            other = PlanOptions() if field.name == "options" else type(getattr(plan, field.name))()
            assert seal(replace(plan, **{field.name: other})).digest != plan.digest, field.name


@pytest.mark.parametrize("key", ["templates", "placed", "options", "specs", "digest"])
def test_malformed_plans_are_refused(key):
    plain = plan_to_plain(example().plan)
    del plain[key]
    with pytest.raises(PlanError, match="malformed plan"):
        plan_from_plain(plain)


def test_malformed_programs_are_refused():
    with pytest.raises(PlanError, match="malformed program"):
        program_from_plain({"rank": 0})
