"""Who is which rank of a refit under NeMo RL, and what reaches the workers of its engines."""

from types import SimpleNamespace

import pytest
from equipment.nemo_fakes import FakeGeneration, FakePolicy

from nemo_rl_reshard.errors import StateError, TargetError
from nemo_rl_reshard.integrations.nemo_rl.engine_rank import forget_old_weights, num_unfinished, perform_on_engine
from nemo_rl_reshard.integrations.nemo_rl.members import members_of
from nemo_rl_reshard.integrations.nemo_rl.policy_rank import perform_on_policy
from nemo_rl_reshard.orchestration.shared import Shared
from nemo_rl_reshard.orchestration.world import Seating

LAYOUTS = {
    # name: trainers, engines, tp, pp, expected ranks of every engine
    "b13: two engines of two": (2, 2, 2, 1, [[2, 3], [4, 5]]),
    "one engine of three after five trainers": (5, 1, 3, 1, [[5, 6, 7]]),
    "pipeline stages count as well": (1, 2, 2, 3, [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]),
    "b13: experts over two groups of two engines": (3, 4, 1, 1, [[3], [4], [5], [6]]),
}


def seated(num_trainers, num_engines, tp, pp):
    """The members of a world whose actors are their own names; an engine's first actor owns it."""
    size = tp * pp
    actors = [f"actor {index}" for index in range(num_engines * size)]
    generation = FakeGeneration(actors, range(0, len(actors), size), {"vllm_cfg": {"async_engine": False}}, tp=tp)
    generation.pp_size = pp
    return members_of(FakePolicy([f"trainer {rank}" for rank in range(num_trainers)]), generation)


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_b13_b14_ranks_are_trainers_then_engines_by_executor_rank(case):
    num_trainers, num_engines, tp, pp, expected = case
    trainers, engines = seated(num_trainers, num_engines, tp, pp)
    assert [member.handle for member in trainers] == [f"trainer {rank}" for rank in range(num_trainers)]
    assert [member.handle for member in engines] == [f"actor {index * tp * pp}" for index in range(num_engines)]
    seating = Seating.of(trainers, engines)
    ranks = {member.name: list(range(first, first + member.num_ranks)) for first, member in seating.members.items()}
    assert [ranks[member.name] for member in engines] == expected
    assert [ranks[member.name] for member in trainers] == [[rank] for rank in range(num_trainers)]
    assert sorted(rank for held in ranks.values() for rank in held) == list(range(seating.size))


def test_b13_a_worker_takes_the_argument_of_its_rank_in_its_own_executor():
    """Not of its rank in torch.distributed, which counts the engines before it when experts are shared."""
    taken = []

    class Worker:
        rank = 1
        global_rank = 5

        def reshard_perform(self, operation, arguments, shared):
            taken.append((operation, arguments[self.rank], shared))
            return {"rank": arguments[self.rank]["rank"]}

    assert perform_on_engine(Worker(), "refit", [{"rank": 6}, {"rank": 7}], {"a": 1}) == {"rank": 7}
    assert taken == [("refit", {"rank": 7}, {"a": 1})]


@pytest.mark.parametrize("is_async", [False, True])
def test_b65_requests_are_counted_in_the_front_end_of_either_engine(is_async):
    front = SimpleNamespace(output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 3))
    assert num_unfinished(SimpleNamespace(llm=front if is_async else SimpleNamespace(llm_engine=front))) == 3


def test_b66_a_prefix_cache_that_stays_is_an_error():
    stays = SimpleNamespace(reset_prefix_cache=lambda: False, llm_engine=SimpleNamespace())
    with pytest.raises(TargetError, match="keeps its prefix cache"):
        forget_old_weights(SimpleNamespace(llm=stays))


def test_no_actor_is_asked_without_ray(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    (trainer,), (engine,) = seated(1, 1, 1, 1)
    for member in (trainer, engine):
        with pytest.raises(StateError, match="Ray is shut down"):
            member.submit("close", [{"rank": 0}])
        with pytest.raises(StateError, match="Ray is shut down"):
            member.submit("adopt", [{"rank": 0}], Shared({"plan": "text"}))


def test_a_decorated_actor_that_takes_no_positional_arguments_is_reached(monkeypatch):
    """Ray reads a decorator's `*args, **kwargs` without the first of them, as `self`, and refuses positional ones."""
    monkeypatch.setattr("nemo_rl_reshard.integrations.nemo_rl.members.require_ray", lambda: None)

    class Decorated:
        def remote(self, **named):
            return named

    trainer = members_of(FakePolicy([SimpleNamespace(__ray_call__=Decorated())]), FakeGeneration([], [], {}))[0][0]
    asked = trainer.submit("refit", [{"rank": 0}])
    assert asked == {"fn": perform_on_policy, "operation": "refit", "arguments": [{"rank": 0}], "shared": None}
