"""Plans as text: equal after a round trip, and refused when changed."""

import json
from dataclasses import fields, replace

import pytest
from equipment.declaring import one_tensor

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.codec import digest_of, plan_from_text, plan_to_text, seal
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


def resealed(text):
    """A text that was changed and sealed again, as an honest sender of another version would."""
    return text, digest_of(text)


def test_b70_plans_survive_as_text():
    plan = full_example()
    again = plan_from_text(plan_to_text(plan), plan.digest)
    assert again == plan
    assert list(again.transfers()) == list(plan.transfers())
    assert plan_to_text(again) == plan_to_text(plan)
    assert plan_to_text(plan).isascii()


def test_names_that_are_not_ascii_survive():
    plan = full_example()
    named = seal(replace(plan, skipped={"m\u00f6del": "dr\u00e4ft"}))
    assert plan_from_text(plan_to_text(named), named.digest) == named


def test_a_program_lowered_from_a_plan_that_travelled_is_equal():
    found = example()
    plan = plan_from_text(plan_to_text(found.plan), found.plan.digest)
    for rank in found.ranks:
        assert lower(plan, rank) == lower(found.plan, rank)


@pytest.mark.parametrize("change", ["0", "9", "\u00e4"])
def test_no_character_of_a_plan_can_change_without_its_digest(change):
    """`B09`: whatever is changed in the text, down to one offset of one piece, is refused."""
    plan = full_example()
    text = plan_to_text(plan)
    for place in range(len(text)):
        if text[place] != change:
            with pytest.raises(PlanError, match=r"was changed on the way|malformed plan"):
                plan_from_text(f"{text[:place]}{change}{text[place + 1 :]}", plan.digest)


def test_every_field_of_a_plan_is_sealed():
    plan = full_example()
    for field in fields(plan):
        if field.name != "digest":
            other = PlanOptions() if field.name == "options" else type(getattr(plan, field.name))()
            assert seal(replace(plan, **{field.name: other})).digest != plan.digest, field.name


def test_malformed_plans_are_refused_though_their_digest_fits():
    plain = json.loads(plan_to_text(full_example()))
    for place in range(1, len(plain)):
        broken = [*plain[:place], 7, *plain[place + 1 :]]
        with pytest.raises(PlanError, match="malformed plan"):
            plan_from_text(*resealed(json.dumps(broken)))
    for text in ("", "[]", "{}", "7", "[2]"):
        with pytest.raises(PlanError, match="malformed plan"):
            plan_from_text(*resealed(text))


def test_a_plan_of_another_version_says_so():
    _, *content = json.loads(plan_to_text(example().plan))
    with pytest.raises(PlanError, match="schema 1, this package reads 2: use one version everywhere"):
        plan_from_text(*resealed(json.dumps([1, *content])))
