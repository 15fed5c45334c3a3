"""What the planner owes: determinism, wire dtypes, padding, skips and one error for all that is missing."""

import pytest
from equipment.declaring import GATE, catalog, layout, one_tensor, refit, rows
from equipment.plan_runs import assert_delivered

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import Route, RouteKind, RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.lower import lower
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.topology import Topology


def test_b09_equal_sizes_on_other_ranks_are_another_plan():
    one = one_tensor((8, 2), ((2,), "S(0)", (0, 1)), ((2,), "S(1)", (2, 3)))
    two = one_tensor((8, 2), ((2,), "S(0)", (0, 1)), ((2,), "S(1)", (4, 5)))
    assert one.plan.digest != two.plan.digest
    assert {t.dst for t in two.plan.transfers()} == {4, 5}


def test_b10_a_plan_made_again_from_new_objects_is_equal_and_has_the_same_digest():
    def make():
        topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))
        return one_tensor((9, 6), ((2, 2), "R S(0)", range(4)), ((2, 2), "R S(1)", range(4, 8)), topology).plan

    one, two = make(), make()
    assert one == two
    assert one.digest == two.digest
    assert len(one.digest) == 64


def test_b37_the_wire_dtype_is_the_receivers_for_each_tensor():
    bias = TensorSpec("model.layers.0.mlp.gate.e_score_correction_bias", (4,), "float32")
    weight = TensorSpec(GATE, (4, 2), "float32")
    source = catalog(Side.TRAINER, (0,), [(s, layout(s.shape, (1,), "R", (0,))) for s in (bias, weight)])
    half = TensorSpec(GATE, (4, 2), "bfloat16")
    target = catalog(Side.INFERENCE, (1,), [(s, layout(s.shape, (1,), "R", (1,))) for s in (bias, half)])
    plan = make_plan(source, target, decide_routes(source, target, RoutePolicy.ALL), Topology())
    parts = {part.tensor: part for message in lower(plan, 1).messages for part in message.parts}
    assert (parts[bias.name].dtype, parts[bias.name].nbytes) == ("float32", 16)
    assert (parts[GATE].dtype, parts[GATE].nbytes) == ("bfloat16", 16)


def test_b35_source_padding_never_travels():
    name = "lm_head.weight"
    given, wanted = layout((104, 2), (4,), "S(0)", range(4)), rows((101, 2), {4: [(0, 64)], 5: [(64, 37)]})
    source = catalog(Side.TRAINER, range(4), [(TensorSpec(name, (104, 2), "float32"), given)])
    target = catalog(Side.INFERENCE, (4, 5), [(TensorSpec(name, (101, 2), "float32"), wanted)])
    check_match(source, target, padded={name: (101, 2)})
    plan = make_plan(source, target, decide_routes(source, target, RoutePolicy.ALL), Topology())
    assert max(transfer.region.stop[0] for transfer in plan.transfers()) == 101
    assert sum(transfer.region.numel for transfer in plan.transfers()) == 202


def test_elements_that_no_trainer_holds_are_one_error_for_all_tensors():
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (4 + i, 2), "float32") for i in range(2)]
    # An inference side's catalog may have gaps, which no trainer's may: use one as a broken source.
    source = catalog(Side.INFERENCE, (0,), [(spec, rows(spec.shape, {0: [(0, 3)]})) for spec in specs])
    target = catalog(Side.INFERENCE, (1,), [(s, layout(s.shape, (1,), "R", (1,))) for s in specs])
    routes = {spec.name: Route(RouteKind.DIRECT, "test") for spec in specs}
    with pytest.raises(PlanError) as caught:
        make_plan(source, target, routes, Topology())
    assert all(spec.name in str(caught.value) for spec in specs)
    assert "rank 1 needs offset (3, 0) extent (1, 2)" in str(caught.value)


def test_leftovers_and_skips_keep_their_reasons_and_model_order():
    names = ["model.embed_tokens.weight", GATE, "model.norm.weight"]
    whole = layout((4, 2), (1,), "R", (0,))
    source = catalog(Side.TRAINER, (0,), [(TensorSpec(n, (4, 2), "float32"), whole) for n in [*names, "mtp.fc.weight"]])
    wanted = layout((4, 2), (1,), "R", (1,))
    target = catalog(Side.INFERENCE, (1,), [(TensorSpec(n, (4, 2), "bfloat16"), wanted) for n in names])
    plan = make_plan(source, target, decide_routes(source, target, RoutePolicy.FFN), Topology())
    assert [(left.tensor, left.nbytes) for left in plan.leftovers] == [(names[0], 16), (names[2], 16)]
    assert all(left.reason for left in plan.leftovers)
    assert list(plan.skipped) == ["mtp.fc.weight"]
    assert list(plan.specs) == names
    assert [spec.name for spec in lower(plan, 1).leftovers] == [names[0], names[2]]
    assert (
        lower(
            make_plan(source, target, decide_routes(source, target, RoutePolicy.FFN), Topology(), broadcast=True), 1
        ).leftovers
        == ()
    )


def test_tensors_of_equal_kind_share_one_template():
    specs = [TensorSpec(f"model.layers.{i}.mlp.up_proj.weight", (6, 9), "float32") for i in range(30)]
    given, wanted = layout((6, 9), (2,), "S(0)", (0, 1)), layout((6, 9), (3,), "S(1)", (2, 3, 4))
    found = refit([(spec, given, wanted) for spec in specs], (0, 1), (2, 3, 4))
    assert len(found.plan.templates) == 1
    assert len(found.plan.templates[0].variants) == 1
    assert len(list(found.plan.transfers())) == 30 * 6
    assert_delivered(found)


@pytest.mark.parametrize(("bucket", "message"), [(0, 8), (-5, 8), (8, 0), (7, 8)])
def test_b39_limits_that_hold_no_element_are_refused(bucket, message):
    with pytest.raises(PlanError, match="must be at least 8"):
        PlanOptions(bucket_bytes=bucket, message_bytes=message)


def test_b38_limits_are_part_of_the_digest():
    def digest(bucket):
        options = PlanOptions(bucket_bytes=bucket)
        return one_tensor((4, 2), ((1,), "R", (0,)), ((1,), "R", (1,)), options=options).plan.digest

    assert digest(100) != digest(60)
