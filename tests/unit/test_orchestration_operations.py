"""What crosses between driver and ranks: plain JSON only, one surface for both sides. B67 B70 B71."""

import inspect
import json
import sys
from subprocess import run
from typing import Any

import pytest
from equipment.ray_light import SPECS, rows_of, whole

from nemo_rl_reshard.layout import Region
from nemo_rl_reshard.orchestration import worker_extension
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.rank_operations import OPERATIONS, HeldRank, perform
from nemo_rl_reshard.orchestration.served_ranks import ServedRanks
from nemo_rl_reshard.orchestration.trainer_actor import ReshardTrainer
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.endpoint import Source, Target
from nemo_rl_reshard.runtime.explicit import ExplicitSource, ExplicitTarget
from nemo_rl_reshard.runtime.session import RankSession
from nemo_rl_reshard.sources.dtensor import DTensorSource


class Trainer(ReshardTrainer):
    """One trainer that holds everything."""

    def reshard_source(self, rank: int) -> Source:
        shards = {spec.name: [(box, whole(spec, 1)[box.slices]) for box in rows_of(spec, 0)] for spec in SPECS}
        return ExplicitSource(SPECS, shards)


def ask(trainer: Trainer, operation: str, **argument: Any) -> Outcome:
    """As it travels: through JSON in both directions."""
    sent = json.loads(json.dumps([{"rank": 0, "epoch": 1, "answer_within_s": 5.0, **argument}]))
    (answer,) = json.loads(json.dumps(trainer.reshard(operation, sent)))
    return Outcome.from_plain(answer)


def test_b70_a_declaration_survives_json_in_both_directions():
    found = ask(Trainer(), "declare", specs=None, num_trainers=1)
    assert found.fault is None
    assert [spec[0] for spec in found.value["manifest"]["specs"]] == [spec.name for spec in SPECS]
    assert {"host", "pid", "replicas"} <= set(found.value)


def test_an_operation_in_the_wrong_order_is_a_fault_and_not_an_exception():
    trainer = Trainer()
    for operation in ("connect", "adopt", "refit"):
        fault = ask(trainer, operation).fault
        assert fault is not None
        assert str(fault).startswith(f"StateError: {operation}: rank 0 has declared nothing yet")


def test_an_unknown_operation_names_the_known_ones():
    trainer = Trainer()
    ask(trainer, "declare", specs=None, num_trainers=1)
    fault = ask(trainer, "reload").fault
    assert fault is not None
    assert all(name in fault.message for name in OPERATIONS)


def test_the_session_lives_on_its_holder_and_closing_takes_it_away():
    one, other = Trainer(), Trainer()
    ask(one, "declare", specs=None, num_trainers=1)
    first = HeldRank.of(one).session
    assert HeldRank.of(other).session is None
    ask(one, "declare", specs=None, num_trainers=1)
    assert HeldRank.of(one).session is not first
    assert first.state == "closed"
    assert ask(one, "close", failure=None).fault is None
    assert HeldRank.of(one).session is None


def test_a_worker_takes_the_argument_of_its_own_rank():
    class Worker:
        rank = 1

    spec = SPECS[0]
    target = ExplicitTarget([spec], {spec.name: [(Region.whole(spec.shape), whole(spec, 0))]})
    arguments = [{"rank": rank, "epoch": 1, "specs": [], "num_trainers": 2} for rank in (2, 3)]
    answer = perform(Worker(), Side.INFERENCE, lambda _: target, "declare", arguments[Worker.rank])
    outcome = Outcome.from_plain(answer)
    assert outcome.rank == 3
    assert "no trainer has" in str(outcome.fault)


@pytest.mark.parametrize("method", ["manifest", "view"])
def test_b67_every_source_has_the_same_signatures(method):
    expected = _parameters(getattr(Source, method))
    assert _parameters(getattr(DTensorSource, method)) == expected
    assert _parameters(getattr(ExplicitSource, method)) == expected


@pytest.mark.parametrize("method", ["manifest", "begin", "view", "tensor_done", "load", "finish", "abandon"])
def test_b67_every_target_has_the_same_signatures(method):
    target = pytest.importorskip("nemo_rl_reshard.targets.vllm_target").VllmTarget
    expected = _parameters(getattr(Target, method))
    assert _parameters(getattr(target, method)) == expected
    assert _parameters(getattr(ExplicitTarget, method)) == expected


def test_b67_both_sides_and_both_ways_in_take_the_same_arguments():
    assert _parameters(ReshardTrainer.reshard) == _parameters(ServedRanks.reshard)
    extension = worker_extension.ReshardWorkerExtension.reshard_perform
    assert _parameters(extension)[1:] == _parameters(worker_extension.perform_on_worker)[1:]
    for operation in set(OPERATIONS):
        assert callable(getattr(RankSession, operation))


def test_b71_what_runs_in_an_engine_worker_needs_neither_ray_nor_pydantic_nor_this_packages_driver():
    """Whether a worker's environment has them is not ours to say; that our code does not ask for them is."""
    script = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('ray', 'pydantic', 'omegaconf', 'typer', 'rich', 'matplotlib'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import nemo_rl_reshard.orchestration.rank_operations\n"
        "import nemo_rl_reshard.orchestration.trainer_actor\n"
    )
    done = run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def _parameters(function: Any) -> list[tuple[str, Any]]:
    """Without what Ray adds to a method, for tracing, once an actor was made of its class."""
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.default) for each in parameters if not each.name.startswith("_ray")]
