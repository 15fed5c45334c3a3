"""The `refit:` section of a run's configuration: its fields, defaults and rules, every violation reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum
from threading import TIMEOUT_MAX
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nemo_rl_reshard.errors import ConfigError, FaultList, LayoutError, PlanError
from nemo_rl_reshard.params.routing import RoutePolicy
from nemo_rl_reshard.plan.plan import PlanOptions
from nemo_rl_reshard.runtime.handout import DEFAULT_IN_FLIGHT
from nemo_rl_reshard.runtime.order import VerifyMode
from nemo_rl_reshard.topology import Topology

MIB = 1 << 20


class Backend(StrEnum):
    """How weights travel: shard to shard, or every tensor gathered on the trainers and broadcast to every engine."""

    RESHARD = "reshard"
    GATHER_BROADCAST = "gather_broadcast"


class TransportKind(StrEnum):
    """What bytes travel over. AUTO is NCCL where every rank has its weights on a GPU of its own, else gloo."""

    AUTO = "auto"
    GLOO = "gloo"
    NCCL = "nccl"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TopologyConfig(_Section):
    """Where ranks sit, when what the ranks report themselves (one domain per host) is not what is wanted.

    `domains` partition the ranks of the refit world; a rank named by none is a domain of its own. Rates are
    10^9 bytes per second, per rank, one way.
    """

    domains: tuple[tuple[int, ...], ...] | None = None
    # As in a refit spec: far beyond any link, and nothing made from them overflows.
    network_gb_per_s: float = Field(default=50.0, ge=1e-12, le=1e12)
    fast_gb_per_s: float = Field(default=450.0, ge=1e-12, le=1e12)

    def topology(self, hosts: Mapping[int, str]) -> Topology:
        """The topology of a world whose rank `r` runs on `hosts[r]`. Raises LayoutError for a rank named twice."""
        return Topology(
            domains=self.domains if self.domains is not None else domains_of_hosts(hosts),
            network_bytes_per_s=self.network_gb_per_s * 1e9,
            fast_bytes_per_s=self.fast_gb_per_s * 1e9,
        )


class RefitConfig(_Section):
    """One refit set-up. Sizes are bytes, times seconds.

    `deadline_s` bounds a refit on every rank; `grace_s` is what the driver adds for the answer to travel, and what a
    rank gets to answer once the refit was called off. `setup_s` bounds what comes before the first refit of a world:
    engines that are still starting, tracing, planning. `host` is the address of the job on which the driver's
    rendezvous listens, and nothing else.
    """

    backend: Backend = Backend.RESHARD
    route: RoutePolicy = RoutePolicy.FFN
    verify: VerifyMode = VerifyMode.OFF
    transport: TransportKind = TransportKind.AUTO
    bucket_bytes: int = 64 * MIB
    message_bytes: int = 4 * MIB
    in_flight: int = Field(default=DEFAULT_IN_FLIGHT, ge=1, le=1024)
    deadline_s: float = Field(default=120.0, gt=0)
    grace_s: float = Field(default=15.0, gt=0)
    setup_s: float = Field(default=900.0, gt=0)
    host: str = Field(default="127.0.0.1", min_length=1)
    architecture: str | None = None
    topology: TopologyConfig = TopologyConfig()

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> Self:
        """Read a `refit:` section.

        Raises ConfigError listing every violation: unknown keys (with the nearest right name), values of the wrong
        type or range, and fields that contradict each other.
        """
        found, violations = cls.examine(section)
        faults = FaultList("refit configuration", ConfigError)
        faults.extend(violations)
        faults.raise_if_any()
        return found

    @classmethod
    def examine(cls, section: Mapping[str, Any]) -> tuple[Self, tuple[str, ...]]:
        """The section as far as it is sound (defaults stand in for what is not), and a sentence for each violation."""
        try:
            found = cls.model_validate(dict(section))
        except ValidationError as refused:
            details = refused.errors(include_url=False)
            # What is left after the faulty fields fell out is checked too, so that one reading finds everything.
            faulty = {detail["loc"][0] for detail in details}
            sound = cls.model_validate(
                {key: section[key] for key in cls.model_fields if key in section.keys() - faulty}
            )
            violations = (*(_sentence(cls, detail) for detail in details), *_contradictions(sound, faulty))
            return sound, violations
        return found, tuple(_contradictions(found, set()))


def domains_of_hosts(hosts: Mapping[int, str]) -> tuple[tuple[int, ...], ...]:
    """One domain per host, ranks ascending: what a live world uses unless it is told otherwise."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(hosts):
        by_host.setdefault(hosts[rank], []).append(rank)
    return tuple(tuple(ranks) for ranks in by_host.values())


def _sentence(model: type[BaseModel], detail: Mapping[str, Any]) -> str:
    """One pydantic complaint as a sentence that names the field and the fix."""
    path = ".".join(str(step) for step in detail["loc"])
    if detail["type"] == "extra_forbidden":
        for step in detail["loc"][:-1]:
            annotation = model.model_fields[str(step)].annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                model = annotation
        known = list(model.model_fields)
        near = get_close_matches(str(detail["loc"][-1]), known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        return f"{path}: unknown key; {fix}"
    return f"{path}: {detail['msg'][0].lower()}{detail['msg'][1:]}, got {detail['input']!r}"


def _contradictions(config: RefitConfig, faulty: set[int | str]) -> Iterator[str]:
    """Rules across fields; a rule about a field that is already known to be wrong is left out."""
    for name in ("bucket_bytes", "message_bytes"):
        if name not in faulty:
            try:
                PlanOptions(**{name: getattr(config, name)})
            except PlanError as fault:
                yield str(fault)
    if not faulty & {"bucket_bytes", "message_bytes"} and config.message_bytes > config.bucket_bytes:
        yield (
            f"message_bytes: {config.message_bytes} is more than bucket_bytes {config.bucket_bytes}; "
            "a bucket is sent as messages, so lower message_bytes or raise bucket_bytes"
        )
    for name in ("deadline_s", "grace_s", "setup_s"):
        if name not in faulty and getattr(config, name) > TIMEOUT_MAX:
            yield f"{name}: must be finite, at most {TIMEOUT_MAX:g} s, because every wait ends"
    if "host" not in faulty and config.host in ("0.0.0.0", "::", "*"):
        yield f"host: {config.host} listens everywhere; give the one address on which the job's ranks reach the driver"
    if "topology" not in faulty:
        try:
            config.topology.topology({})
        except LayoutError as fault:
            yield f"topology.domains: {fault}"
