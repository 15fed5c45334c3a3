"""Whole refits between real processes over gloo: right values, a killed process, a rebuilt world."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from equipment.refit_worlds import MLP, NORM, mixed_ranks

from nemo_rl_reshard.cli.explicit_rank import ExplicitRank, LiveRank
from nemo_rl_reshard.cli.rank_processes import run_ranks
from nemo_rl_reshard.cli.spec import parse_spec
from nemo_rl_reshard.cli.verify_spec import verify_spec
from nemo_rl_reshard.errors import RefitError, ReshardError, TransportTimeoutError
from nemo_rl_reshard.runtime.world import join_processes


def spec(num_sources: int, target_ranks: list[Any], domains: list[list[int]], route: str) -> dict[str, Any]:
    """Rows of an uneven matrix over the trainers, one of them empty in the bias; columns for the engines."""
    nested = isinstance(target_ranks[0], list)
    return {
        "tensors": [
            {
                "name": MLP,
                "shape": [11, 6],
                "dtype": "float32",
                "source": {"ranks": list(range(num_sources)), "placements": ["S(0)"]},
                "target": {"ranks": target_ranks, "placements": ["R", "S(1)"] if nested else ["S(1)"]},
            },
            {
                "name": NORM,
                "shape": [num_sources + 1],
                "dtype": "bfloat16",
                "source": {"ranks": list(range(num_sources)), "placements": ["S(0)"]},
                "target": {"ranks": target_ranks, "placements": ["R", "R"] if nested else ["R"]},
            },
        ],
        "topology": {"domains": domains},
        "route": route,
        "message_bytes": 32,
        "bucket_bytes": 128,
    }


def test_colocated_leftovers_among_the_very_same_ranks() -> None:
    """Gathering and sending share one gloo group: started in another order on one rank, they would wait for ever."""
    side = {"ranks": [0, 1, 2], "placements": ["S(0)"]}
    names = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(5)]
    tensors = [{"name": name, "shape": [7], "dtype": "float32", "source": side, "target": side} for name in names]
    plain = {"colocated": True, "tensors": tensors, "bucket_bytes": 128}
    result = verify_spec(parse_spec(plain), processes=True, timeout_s=60.0)
    assert result.passed, result.differences


@pytest.mark.parametrize(
    ("num_sources", "target_ranks", "domains", "route"),
    [
        (1, [7], [], "all"),
        (2, [2, 3, 4], [], "ffn"),
        (3, [[10, 11], [12, 13]], [[10, 11, 12, 13]], "all"),
        (2, [[9, 4, 6], [5, 8, 7]], [[9, 4, 6], [5, 8, 7]], "ffn"),
    ],
    ids=["1to1", "2to3", "3to2x2_one_domain", "2to2x3_reordered"],
)
def test_two_refits_between_processes(
    num_sources: int, target_ranks: list[Any], domains: list[list[int]], route: str
) -> None:
    """2 to 8 processes; forwards inside domains; ranks in any order and with gaps; leftovers with an empty trainer."""
    result = verify_spec(parse_spec(spec(num_sources, target_ranks, domains, route)), processes=True, timeout_s=120)
    assert result.passed, result.differences
    assert result.num_refits == 2
    assert result.num_digests > 0


def _joined(rank: ExplicitRank, world: dict[str, Any]) -> LiveRank:
    live = LiveRank(rank, join_processes)
    live.session.connect(world)
    live.session.adopt(rank.handout)
    return live


def die_in_second_refit(argument: tuple[ExplicitRank, int], world: dict[str, Any]) -> float:
    """One rank kills itself while it receives; the seconds that the others took to notice."""
    rank, victim = argument
    live = _joined(rank, world)
    live.fill(1)
    live.session.refit({"version": 1, "deadline_s": 20.0, "verify": "full"})
    assert live.differences(1) == ([], 0)
    if rank.rank == victim:
        end = live.target if live.target is not None else live.source
        end.view = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, union-attr]
    start_s = time.monotonic()
    try:
        live.session.refit({"version": 2, "deadline_s": 20.0})
    except ReshardError:
        noticed_s = time.monotonic() - start_s
        assert live.session.version is None
        assert live.target is None or not live.target.is_usable
        if noticed_s < 10:
            raise
        raise AssertionError(f"it took {noticed_s} s") from None
    raise AssertionError("a refit without one of its ranks was published")


@pytest.mark.parametrize("victim", [1, 4], ids=["trainer", "engine"])
def test_a_killed_process_is_the_first_cause(victim: int) -> None:
    """`B61`: it is named with its signal; the others only waited, and none of them published anything."""
    with pytest.raises(RefitError) as found:
        run_ranks(
            die_in_second_refit,
            [(rank, victim) for rank in mixed_ranks()],
            num_trainers=2,
            timeout_s=120,
            deadline_s=20,
        )
    assert list(found.value.causes) == [f"rank {victim}"]
    assert f"exit code {-signal.SIGKILL}" in found.value.causes[f"rank {victim}"]
    assert len(found.value.waiting) == 5
    assert not any("AssertionError" in text for text in found.value.waiting.values())


def fail_then_recover(rank: ExplicitRank, world: dict[str, Any]) -> tuple[str, list[str]]:
    """An engine raises in its loader; every rank joins a new generation, and the next two refits are right."""
    live = _joined(rank, world)
    live.fill(1)
    live.session.refit({"version": 1, "deadline_s": 20.0})
    if rank.rank == 3:
        real = live.target.load  # type: ignore[union-attr]

        def broken(_: Any) -> None:
            live.target.load = real  # type: ignore[union-attr, method-assign]
            raise RuntimeError("no memory")

        live.target.load = broken  # type: ignore[union-attr, method-assign]
    failure = ""
    try:
        live.session.refit({"version": 2, "deadline_s": 20.0})
    except (RuntimeError, ReshardError) as error:
        failure = f"{type(error).__name__}: {error}"
    live.session.connect({**world, "generation": 2})
    found: list[str] = []
    for version in (3, 4):
        live.fill(version)
        live.session.refit({"version": version, "deadline_s": 20.0, "verify": "full"})
        found += live.differences(version)[0]
    live.session.close()
    return failure, found


def test_a_new_generation_heals_a_failed_world() -> None:
    """`B61`, `B63`: the adopted plan is kept, so joining is all that a failed rank has to do."""
    results = run_ranks(fail_then_recover, mixed_ranks(), num_trainers=2, timeout_s=120)
    failures = [failure for failure, _ in results]
    assert failures[3] == "RuntimeError: no memory"
    others = failures[:3] + failures[4:]
    assert all(text.startswith("RefitAbortedError") and "no memory" in text for text in others), others
    assert all(found == [] for _, found in results)


def hang(rank: int, world: dict[str, Any]) -> None:
    if rank == 1:
        signal.pause()


def test_processes_that_hang_are_named_and_ended() -> None:
    with pytest.raises(TransportTimeoutError, match=r"ranks \[1\] were not done"):
        run_ranks(hang, [0, 1], num_trainers=1, timeout_s=6)
