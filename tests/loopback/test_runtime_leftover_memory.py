"""What leftovers hold beside the weights when one tensor is far larger than the bucket. B39 B76."""

from __future__ import annotations

from equipment.refit_worlds import ThreadWorld, mesh_layout, planned_ranks

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime.leftover_plan import Gather

EMBEDDING = "model.embed_tokens.weight"
NORMS = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(12)]
EMBEDDING_BYTES, NORM_BYTES = 64 * 8 * 4, 8 * 4


def embedding_and_norms(gather: Gather | None) -> tuple[ExplicitRank, ...]:
    """Two trainers with a shard of everything, two engines that need all of it; nothing is direct."""
    return planned_ranks(
        [(EMBEDDING, mesh_layout((64, 8), (2,), range(2), "S(0)"), "float32")]
        + [(name, mesh_layout((8,), (2,), range(2), "S(0)"), "float32") for name in NORMS],
        [(EMBEDDING, mesh_layout((64, 8), (2,), range(2, 4), "R"), "float32")]
        + [(name, mesh_layout((8,), (2,), range(2, 4), "R"), "float32") for name in NORMS],
        num_trainers=2,
        num_targets=2,
        policy=RoutePolicy.FFN,
        options=PlanOptions(bucket_bytes=4 * NORM_BYTES, message_bytes=16),
        in_flight=2,
        gather=gather,
    )


def test_one_large_tensor_makes_one_set_of_buffers_large_b39() -> None:
    """Gathered and broadcast, the embedding is a batch of its own, whole on root and receivers; the other set is as
    small as the norms.
    """
    ranks = embedding_and_norms(Gather.EVERYWHERE)
    assert [len(batch.specs) for batch in ranks[0].assignment.leftovers.batches] == [1] * 13
    with ThreadWorld(ranks) as world:
        for version in (1, 2):
            world.refit(version)
            # Not what the ranks report: in one process, ranks hold each other's buffers for a moment.
            held = {rank: session._work.leftovers._allocated_bytes for rank, session in world.sessions.items()}
            whole = EMBEDDING_BYTES + NORM_BYTES
            share = whole // 2
            assert held[2] == held[3] == whole
            assert held[1] == 3 * share, "its own, and those of both trainers"
            assert held[0] == 3 * share + whole, "and what it assembles"


def test_leftovers_beside_the_rest_hold_what_is_under_way_b39() -> None:
    """A receiver holds the embedding until it is loaded, and norms that are in flight or wait for the loader."""
    with ThreadWorld(embedding_and_norms(None)) as world:
        for version in (1, 2):
            world.refit(version)
            for rank in (2, 3):
                held = world.sessions[rank]._work.mover._target.peak_bytes
                assert EMBEDDING_BYTES <= held <= EMBEDDING_BYTES + 4 * NORM_BYTES
                assert sorted(world.live[rank].target.loaded) == sorted([EMBEDDING, *NORMS])
