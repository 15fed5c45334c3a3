"""A refit spec by model: a model and the parallel sizes of both sides, laid out into the same RefitSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nemo_rl_reshard.cli.hf_model import read_model
from nemo_rl_reshard.cli.quantities import bytes_text
from nemo_rl_reshard.cli.refit_spec import Described, RefitSpec, check_buckets, faults_in, read_options, read_policy
from nemo_rl_reshard.cli.spec_fields import Fields
from nemo_rl_reshard.cli.spec_parallel import SOURCES, TARGETS, ParallelSide, read_parallel
from nemo_rl_reshard.cli.spec_topology import read_topology
from nemo_rl_reshard.errors import ConfigError, FaultList
from nemo_rl_reshard.params.catalog import Catalog
from nemo_rl_reshard.params.match import check_match
from nemo_rl_reshard.params.routing import RoutePolicy, decide_routes
from nemo_rl_reshard.topology import Topology
from nemo_rl_reshard.virtual.fsdp2 import fsdp2_source
from nemo_rl_reshard.virtual.megatron import megatron_source
from nemo_rl_reshard.virtual.model import ModelShape
from nemo_rl_reshard.virtual.vllm import vllm_target

Laid = TypeVar("Laid")

_BUCKET_BYTES = 256 << 20
"""A GPU of a cluster has this to spare, and steps are then long enough that their latencies do not count."""
_KEYS = ("model", "source", "target", "topology", "route", "bucket_bytes", "message_bytes")


def parse_model_spec(
    plain: dict[str, Any], faults: FaultList, folder: Path | None = None, model: ModelShape | None = None
) -> RefitSpec:
    """Read a spec by model from plain values; trainers are ranks 0 and up, engines follow them.

    A relative `hf_config` is looked for in `folder`, then in the working directory. `model` is what `plain` names, for
    those who have read it already. Raises ConfigError listing every fault, those already in `faults` included.
    """
    fields = Fields(plain, "", faults, _KEYS)
    if model is None:
        model = _laid_out(lambda: model_of(plain, folder), "model", faults)
    trainers = engines = None
    if not fields.lacks("source", f"a side with a backend ({' or '.join(SOURCES)}), world and parallel sizes"):
        trainers = read_parallel(plain["source"], "source", SOURCES, faults)
    if not fields.lacks("target", f"a side with a backend ({' or '.join(TARGETS)}), world and parallel sizes"):
        engines = read_parallel(plain["target"], "target", TARGETS, faults)
    first = trainers.world if trainers else 0
    ranks = (range(first), range(first, first + (engines.world if engines else 0)))
    topology = read_topology(plain.get("topology"), ranks, faults)
    policy = read_policy(plain.get("route", RoutePolicy.FFN), faults)
    options = read_options(fields, _BUCKET_BYTES)
    source = target = None
    if model is not None and trainers is not None:
        source = _laid_out(lambda: source_catalog(model, trainers), "source", faults)
    if model is not None and engines is not None:
        target = _laid_out(lambda: target_catalog(model, engines, first), "target", faults)
    if model is not None:
        check_buckets(model.specs, options, faults)
    faults.raise_if_any()
    if model is None or trainers is None or engines is None or source is None or target is None:
        raise AssertionError("what could not be read was not noted as a fault")
    check_match(source, target)
    described = Described(
        model=f"{model.name} ({bytes_text(model.nbytes)})",
        source=trainers.text,
        target=engines.text,
        topology=_topology_text(plain.get("topology"), topology),
        assumptions=model.assumptions,
        architecture=model.architecture,
    )
    routes = decide_routes(source, target, policy, model.architecture)
    return RefitSpec(source, target, routes, topology, options, described)


def model_of(plain: Mapping[str, Any], folder: Path | None = None) -> ModelShape:
    """The model that a spec names. Raises ConfigError listing every fault of it."""
    given = plain["model"]
    if not isinstance(given, dict):
        raise ConfigError(f"model: must be a mapping with a preset or an hf_config; got {given!r}")
    path = given.get("hf_config")
    if folder is not None and isinstance(path, str) and (folder / path).exists():
        given = {**given, "hf_config": str(folder / path)}
    return read_model(given)


def source_catalog(model: ModelShape, side: ParallelSide) -> Catalog:
    """The trainers' catalog. Raises ConfigError listing every size that does not fit the model."""
    sizes = dict(side.sizes)
    if side.backend == "fsdp2":
        return fsdp2_source(model, world=side.world, **sizes)
    sizes.pop("dp")  # what the other sizes leave of the world
    return megatron_source(model, world=side.world, **sizes, stages=side.stages, vocab_multiple=side.vocab_multiple)


def target_catalog(model: ModelShape, side: ParallelSide, first_rank: int) -> Catalog:
    """The engines' catalog, its ranks from `first_rank` on. Raises as `source_catalog`."""
    return vllm_target(model, world=side.world, first_rank=first_rank, **{"tp": 1, **side.sizes})


def _laid_out(make: Callable[[], Laid], key: str, faults: FaultList) -> Laid | None:
    """What `make` returns; None, with its faults noted under `key`, where it refuses."""
    try:
        return make()
    except ConfigError as fault:
        faults.extend(text if text.startswith(key) else f"{key}: {text}" for text in faults_in(fault))
        return None


def _topology_text(plain: Any, topology: Topology) -> str:
    sizes = sorted({len(domain) for domain in topology.domains}, reverse=True)
    named = f"{plain['preset']}, " if isinstance(plain, dict) and "preset" in plain else ""
    return f"{named}domains of {' and '.join(map(str, sizes))}" if sizes else "every rank a domain of its own"
