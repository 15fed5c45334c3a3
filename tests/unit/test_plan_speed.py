"""B77: planning many experts takes time in proportion, and not much of it."""

import time

from equipment.declaring import layout, manifests, rows

from nemo_rl_reshard.params.catalog import merge
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.params.spec import TensorSpec
from nemo_rl_reshard.plan.planner import make_plan
from nemo_rl_reshard.topology import Topology

BUDGET_S = 5.0


def test_b77_18432_expert_tensors_over_16_to_16_ranks_are_planned_in_seconds():
    row_wise, column_wise = (768, 2048), (2048, 768)
    holds = {shape: [rows(shape, {rank: [(0, shape[0])]}) for rank in range(16)] for shape in (row_wise, column_wise)}
    wants = {
        row_wise: layout(row_wise, (4, 4), "R S(0)", range(16, 32)),
        column_wise: layout(column_wise, (4, 4), "R S(1)", range(16, 32)),
    }
    tensors = []
    for depth in range(48):
        for expert in range(128):
            for part, shape in (("gate_proj", row_wise), ("up_proj", row_wise), ("down_proj", column_wise)):
                name = f"model.layers.{depth}.mlp.experts.{expert}.{part}.weight"
                tensors.append((TensorSpec(name, shape, "bfloat16"), holds[shape][expert // 8], wants[shape]))
    trainers = manifests(Side.TRAINER, range(16), [(spec, given) for spec, given, _ in tensors])
    engines = manifests(Side.INFERENCE, range(16, 32), [(spec, wanted) for spec, _, wanted in tensors])
    topology = Topology(domains=(tuple(range(16, 24)), tuple(range(24, 32))))

    start = time.process_time()
    source, target = merge(trainers), merge(engines)
    check_match(source, target)
    plan = make_plan(source, target, decide_routes(source, target, RoutePolicy.FFN), topology)
    spent = time.process_time() - start

    assert len(plan.placed) == len(tensors) == 18432
    assert len(plan.templates) == 2, "whoever holds an expert, the moves are the same"
    assert len(plan.crews) == 16
    assert spent < BUDGET_S
