"""The checker must find what is wrong with a plan that was tampered with."""

from dataclasses import replace

import pytest
from equipment.declaring import GATE, catalog, layout, one_tensor

from nemo_rl_reshard.errors import PlanError
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.routing import Route, RouteKind, RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.check import check_plan
from nemo_rl_reshard.plan.codec import seal
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.topology import Link, Topology


@pytest.fixture
def found():
    topology = Topology(domains=((0, 1, 2, 3), (4, 5, 6, 7)))
    return one_tensor((8, 8), ((4,), "S(0)", range(4)), ((2, 2), "R S(0)", range(4, 8)), topology)


def check(found, plan):
    check_plan(plan, found.source, found.target, found.routes, found.topology)


def with_moves(plan, change):
    template = plan.templates[0]
    changed = replace(template, variants=(tuple(change(list(template.variants[0]))),))
    return seal(replace(plan, templates=(changed,)))


def moves_after(found, change):
    return with_moves(found.plan, change)


def test_the_planners_own_plan_passes(found):
    check(found, found.plan)


def test_a_plan_that_skips_tensors_passes():
    """`B17`: a draft layer without a drafter is skipped, and its reason is no count."""
    given, wanted = layout((4, 2), (2,), "S(0)", (0, 1)), layout((4, 2), (1,), "R", (2,))
    specs = [TensorSpec(name, (4, 2), "float32") for name in (GATE, "mtp.layers.0.mlp.down_proj.weight")]
    source = catalog(Side.TRAINER, (0, 1), [(spec, given) for spec in specs])
    target = catalog(Side.INFERENCE, (2,), [(specs[0], wanted)])
    routes = decide_routes(source, target, RoutePolicy.ALL)
    plan = make_plan(source, target, routes, Topology())
    assert set(plan.skipped) == {specs[1].name}
    check_plan(plan, source, target, routes)
    with pytest.raises(PlanError, match="routed skip, the plan does not move it so"):
        check_plan(seal(replace(plan, skipped={})), source, target, routes)


def test_a_missing_transfer_is_found(found):
    with pytest.raises(PlanError, match="which never arrives"):
        check(found, moves_after(found, lambda moves: moves[:-1]))


def test_a_repeated_transfer_is_found(found):
    with pytest.raises(PlanError, match="more than once"):
        check(found, moves_after(found, lambda moves: [*moves, moves[0]]))


def test_a_sender_that_never_had_it_is_found(found):
    with pytest.raises(PlanError, match="sent before its sender has it"):
        check(found, moves_after(found, lambda moves: [moves[0]._replace(src=3), *moves[1:]]))


def test_a_forward_in_the_step_of_its_receive_is_found(found):
    def hasten(moves):
        return [move._replace(lag=0) for move in moves]

    with pytest.raises(PlanError, match="sent before its sender has it"):
        check(found, moves_after(found, hasten))


def test_a_receiver_that_does_not_need_it_is_found(found):
    with pytest.raises(PlanError, match="no part of one region that its receiver needs"):
        check(found, moves_after(found, lambda moves: [moves[0]._replace(dst=5), *moves[1:]]))


def test_a_wrong_link_is_found(found):
    with pytest.raises(PlanError, match="called fast, the topology says network"):
        check(found, moves_after(found, lambda moves: [moves[0]._replace(link=Link.FAST), *moves[1:]]))
    with pytest.raises(PlanError, match="is called local"):
        check(found, moves_after(found, lambda moves: [moves[0]._replace(link=Link.LOCAL), *moves[1:]]))


def test_a_changed_plan_with_its_old_digest_is_found(found):
    with pytest.raises(PlanError, match="not that of the content"):
        check(found, replace(found.plan, options=PlanOptions(bucket_bytes=1 << 20)))


def test_a_bucket_that_overflows_is_found(found):
    small = seal(replace(found.plan, options=PlanOptions(bucket_bytes=32)))
    with pytest.raises(PlanError, match="receives 64 bytes in step 0, the bucket holds 32"):
        check(found, small)


def test_a_tensor_left_out_or_routed_otherwise_is_found(found):
    with pytest.raises(PlanError, match="routed direct, the plan does not move it so"):
        check(found, seal(replace(found.plan, placed=())))
    name = found.plan.placed[0].tensor
    with pytest.raises(PlanError, match="the plan calls it direct, it is not routed so"):
        check_plan(found.plan, found.source, found.target, {name: Route(RouteKind.LEFTOVER, "no")}, found.topology)


def test_a_tensor_placed_twice_is_found(found):
    with pytest.raises(PlanError, match="2 times direct"):
        check(found, seal(replace(found.plan, placed=found.plan.placed * 2)))
