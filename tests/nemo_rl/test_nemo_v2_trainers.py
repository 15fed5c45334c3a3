"""Version 2 of the stock DTensor trainer, on models that NeMo Automodel builds, to a stock synchronous engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from stand_ins import in_actors
from stand_ins.models import write_expert_model, write_model, write_tokenizer
from stand_ins.observed import ObservedWorld, assert_two_refits_are_stock
from stand_ins.recipe import Recipe

#: Only these workers find it: where NeMo RL finds Automodel, version 1 of the worker uses its classes too.
AUTOMODEL = Path(sys.prefix) / "automodel"
PROMPT = 16
"""Tokens."""
BACKENDS = ("reshard", "gather_broadcast", "nemo_rl")
LOW_RANK = {"enabled": True, "dim": 4, "alpha": 10, "use_triton": False}


@dataclass(frozen=True)
class Case:
    """A checkpoint, how two trainers hold it, and how some of its tensors are then placed."""

    write: Callable[[Path], Path]
    dtensor: dict[str, Any]
    placements: dict[str, str]


MLP = "model.layers.1.mlp"
#: Automodel computes expert-parallel models in bfloat16, whatever precision is asked for; the others as NeMo RL says.
IN_FP32 = ["fully sharded, tied", "tensor parallel, low rank"]
CASES = {
    "fully sharded, tied": Case(
        partial(write_model, tied=True),
        {},
        {f"{MLP}.down_proj.weight": "dp_shard_cp: S(0)", "model.embed_tokens.weight": "dp_shard_cp: S(0)"},
    ),
    "tensor parallel, low rank": Case(
        write_model,
        {"tensor_parallel_size": 2, **{f"lora_cfg.{key}": value for key, value in LOW_RANK.items()}},
        {f"{MLP}.down_proj.weight": "tp: S(1)", f"{MLP}.down_proj.lora_A.weight": "tp: S(1)"},
    ),
    "expert parallel": Case(
        write_expert_model,
        {"expert_parallel_size": 2},
        {f"{MLP}.experts.gate_and_up_projs": "ep: S(0)"},
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def world(
    cluster: None, checkout: Path, case: Case, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObservedWorld]:
    model = case.write(tmp_path_factory.mktemp("model"))
    write_tokenizer(model)
    search = {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(AUTOMODEL)])}
    chosen = {"_v2": True, "env_vars": search, **case.dtensor}
    others = {f"policy.dtensor_cfg.{key}": value for key, value in chosen.items()}
    others["policy.logprob_batch_size"] = 1
    started = ObservedWorld(Recipe(model, num_trainers=2, others=others), checkout)
    yield started
    started.stop()


def test_two_trainers_hold_the_model_as_asked(world: ObservedWorld, case: Case) -> None:
    for held in world.on_trainers(in_actors.placements, tensors=list(case.placements)):
        assert held == case.placements


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_refits_leave_what_the_stock_loader_would(world: ObservedWorld, backend: str) -> None:
    """B19 B58: experts are stacked and transposed, low-rank layers merged as NeMo RL's own generator merges them."""
    assert_two_refits_are_stock(world, backend)


@pytest.mark.parametrize("case", IN_FP32, indirect=True)
def test_both_sides_then_agree_on_the_probability_of_an_answer(world: ObservedWorld, case: Case) -> None:
    """The stock `get_logprobs` of version 2 against what the engine said of its own answer."""
    world.attach(backend="reshard")
    world.change_weights(-0.75)
    world.refit()
    prompt = torch.arange(2, 34).reshape(2, PROMPT)
    asked = BatchedDataDict({"input_ids": prompt, "input_lengths": torch.full((2,), PROMPT)})
    answered = world.generation.generate(asked, greedy=True)
    world.generation.finish_generation()
    assert _gap(world, answered) <= 1e-4
    world.change_weights(-1.25)
    assert _gap(world, answered) > 1e-2


def _gap(world: ObservedWorld, answered: Any) -> float:
    whole = {"input_ids": answered["output_ids"], "input_lengths": answered["unpadded_sequence_lengths"]}
    found = world.parts.policy.get_logprobs(BatchedDataDict(whole))["logprobs"]
    return float((found - answered["logprobs"])[:, PROMPT:].abs().max())
