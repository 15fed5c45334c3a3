"""The places where the plugin touches NeMo RL, proven on the live objects before anything is built on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nemo_rl_reshard
from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.integrations.nemo_rl.answers import collect
from nemo_rl_reshard.integrations.nemo_rl.description import describe
from nemo_rl_reshard.integrations.nemo_rl.members import EngineMember, PolicyMember, members_of

_MISSING_MODULE = re.compile(r"No module named '([^']+)'")
_WORKER_CLASSES = "nemo_rl_reshard/integrations/nemo_rl/worker_classes.py"


@dataclass(frozen=True, slots=True)
class Seam:
    """A dotted path from one of the driver's objects, what it is needed for, and what to do without it."""

    path: str
    why: str
    fallback: str


_OTHER_RELEASE = "use a NeMo RL release that has it (0.6), or leave refits to it with refit.backend: nemo_rl"
DRIVER_SEAMS = (
    Seam("policy.worker_group.workers", "the trainer actors, in rank order", _OTHER_RELEASE),
    Seam("generation.worker_group.workers", "the engines' actors", _OTHER_RELEASE),
    Seam("generation.worker_group.dp_leader_worker_indices", "which actors own an engine", _OTHER_RELEASE),
    Seam("generation.tp_size", "workers of an engine", _OTHER_RELEASE),
    Seam("generation.pp_size", "workers of an engine", _OTHER_RELEASE),
    Seam("generation.cfg.vllm_cfg.async_engine", "which of two worker classes the engines' actors are", _OTHER_RELEASE),
    Seam("generation.weight_synchronizer", "where NeMo RL's loops look for a synchronizer", _OTHER_RELEASE),
)
"""`policy` and `generation` are what NeMo RL's `setup` returns."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The members of the refit, reached and found in their places; `architecture` of the model that is trained."""

    trainers: tuple[PolicyMember, ...]
    engines: tuple[EngineMember, ...]
    architecture: str | None


def check_seams(policy: Any, policy_generation: Any, clusters: Sequence[Any], within_s: float) -> Checked:
    """Reach every worker of both sides once, waiting at most `within_s` seconds for each side.

    Raises one ConfigError that names every missing seam with its fallback, every worker that cannot run this package
    and every worker that is not where its rank says.
    """
    faults = FaultList("NeMo RL as the plugin finds it", ConfigError)
    faults.extend(missing_seams({"policy": policy, "generation": policy_generation}))
    faults.raise_if_any()
    trainers, engines = members_of(policy, policy_generation)
    faults.extend(_sizes(clusters, trainers, engines))
    faults.extend(_missing_methods(trainers, engines))
    faults.raise_if_any()
    heard = _ask_trainers(trainers, within_s, faults)
    engines, answers = _ask_engines(engines, within_s, faults)
    for member in engines:
        heard |= {member.rank_name(rank): each for rank, each in enumerate(answers.get(member.name, ()))}
    faults.extend(_other_packages(heard))
    faults.raise_if_any()
    return Checked(tuple(trainers), tuple(engines), heard[trainers[0].name]["architecture"])


def missing_seams(owners: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each of DRIVER_SEAMS that `owners` lack."""
    for seam in DRIVER_SEAMS:
        owner, *steps = seam.path.split(".")
        found = owners[owner]
        for step in steps:
            try:
                found = found[step] if isinstance(found, Mapping) else getattr(found, step)
            except (AttributeError, KeyError):
                yield f"{seam.path} is not there ({seam.why}): {seam.fallback}"
                break


def _sizes(clusters: Sequence[Any], trainers: Sequence[PolicyMember], engines: Sequence[EngineMember]) -> Iterator[str]:
    if len(clusters) != 2:
        yield f"clusters: expected the training and the inference cluster that `setup` returns, got {len(clusters)}"
        return
    for name, cluster, members in zip(("training", "inference"), clusters, (trainers, engines), strict=True):
        num_ranks = sum(member.num_ranks for member in members)
        if cluster.world_size() != num_ranks:
            yield f"the {name} cluster has {cluster.world_size()} GPUs, and its worker group {num_ranks} ranks"


def _missing_methods(trainers: Sequence[PolicyMember], engines: Sequence[EngineMember]) -> Iterator[str]:
    if not all(member.takes_functions or member.has_methods for member in trainers):
        yield (
            "trainer actors have no __ray_call__, so no function can be run in them: use a newer Ray, or a worker "
            f"class with ReshardPolicyMethods ({_WORKER_CLASSES})"
        )
    missing = sorted({member.rpc for member in engines if not hasattr(member.handle, member.rpc)})
    for rpc in missing:
        yield f"engine actors have no {rpc}, the only way to their workers: {_OTHER_RELEASE}"


def _ask_trainers(trainers: Sequence[PolicyMember], within_s: float, faults: FaultList) -> dict[str, Mapping[str, Any]]:
    """What every trainer that answered says of itself; B14: its rank has to be its place in the group."""
    references = {
        member.name: member.handle.reshard_describe.remote() if member.has_methods else member.on_actor(describe)
        for member in trainers
    }
    found = collect(references, within_s)
    faults.extend(f"{name}: {cannot_run(why)}" for name, why in found.failures.items())
    for place, member in enumerate(trainers):
        answer = found.answers.get(member.name)
        if answer is not None and answer["rank"] != place:
            faults.add(
                f"{member.name} takes itself for rank {answer['rank']}: policy.worker_group.workers is not in rank "
                "order, and weights would land in the wrong place"
            )
    return found.answers


def _ask_engines(
    engines: Sequence[EngineMember], within_s: float, faults: FaultList
) -> tuple[list[EngineMember], dict[str, list[Mapping[str, Any]]]]:
    """The engines, marked where only methods reach their workers, and what each worker says of itself.

    B13: an engine's workers have to be those of its own executor, counted from 0, however many engines share experts.
    """
    found = collect({member.name: member.on_workers(describe) for member in engines}, within_s)
    refused = {name for name in found.raised if not _MISSING_MODULE.search(found.failures[name])}
    methods = {member.name: member.on_workers("reshard_describe") for member in engines if member.name in refused}
    by_name = collect(methods, within_s)
    for name, why in found.failures.items():
        if name not in refused:
            faults.add(f"{name}: {cannot_run(why)}")
        elif name not in by_name.answers:
            faults.add(
                f"{name}: its workers run no function ({why}): use a worker class with ReshardEngineMethods "
                f"({_WORKER_CLASSES})"
            )
    answers = {**found.answers, **by_name.answers}
    for member in engines:
        ranks = [each["rank"] for each in answers.get(member.name, ())]
        if member.name in answers and ranks != list(range(member.num_ranks)):
            faults.add(
                f"{member.name}: its workers have executor ranks {ranks}, expected {list(range(member.num_ranks))} "
                "(tensor-parallel size x pipeline stages of this engine alone)"
            )
    return [replace(member, by_name=member.name in by_name.answers) for member in engines], answers


def cannot_run(why: str) -> str:
    """`why` a worker could not answer, and what to do where the reason is an import."""
    missing = _MISSING_MODULE.search(why)
    if missing is None:
        return why
    if missing[1].partition(".")[0] != nemo_rl_reshard.__name__:
        return f"its environment lacks {missing[1]}: install it there"
    folder = Path(nemo_rl_reshard.__file__).parents[1]
    return (
        f"its environment cannot import this package ({missing[0]}): put {folder} on PYTHONPATH before NeMo RL "
        "starts Ray (init_ray copies the driver's environment into every worker); it needs torch and numpy there"
    )


def _other_packages(heard: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    here = nemo_rl_reshard.__version__
    for name, answer in heard.items():
        if answer["package"] != here:
            yield f"{name} imports nemo_rl_reshard {answer['package']}, and the driver {here}: install one everywhere"
