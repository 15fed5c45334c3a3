"""RefitController: declares, plans once, agrees, runs, waits for both sides together, and reports or raises once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from nemo_rl_reshard.config import Backend, RefitConfig, TransportKind
from nemo_rl_reshard.errors import StateError
from nemo_rl_reshard.orchestration.asking import Answers, ask, start
from nemo_rl_reshard.orchestration.epoch import next_epoch
from nemo_rl_reshard.orchestration.first_cause import refit_error
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.outcome import Outcome
from nemo_rl_reshard.orchestration.plan_book import PlanBook, Planned, source_catalog
from nemo_rl_reshard.orchestration.rank_environment import compare_environments
from nemo_rl_reshard.orchestration.shared import Shared
from nemo_rl_reshard.orchestration.transport_choice import choose_transport
from nemo_rl_reshard.orchestration.world import Seating, WorldHost, check_reachable
from nemo_rl_reshard.params.manifest import Side
from nemo_rl_reshard.runtime.order import RefitOrder, VerifyMode
from nemo_rl_reshard.runtime.report import RefitReport
from nemo_rl_reshard.transport.devices import DeviceReport

_LOG = logging.getLogger(__name__)


class RefitController:
    """Drives the refits of some trainers and engines from the driver. Not to be called by two threads at once.

    The first refit builds the refit world: ranks declare, a plan is made, they connect, and each lowers its own program
    from the plan. Later refits only run. A failed refit tears the world down and takes the engines out of service; the
    next one builds a new generation, for which members that were lost must have been replaced.
    """

    def __init__(
        self, trainers: Sequence[Member], engines: Sequence[Member], config: RefitConfig, *, epoch: int = 0
    ) -> None:
        """Seat both sides. Starts nothing. Raises DeclarationError for an empty side or a name used twice.

        `epoch` is that of another controller which drove the same members, in another process say, and after which
        this one carries on.
        """
        self._config = config
        self._seating = Seating.of(trainers, engines)
        self._book = PlanBook(config)
        self._world: WorldHost | None = None
        self._generation = 0
        self._epoch = epoch
        self._adopted: str | None = None
        self._joined: dict[int, Member] = {}
        self._lost: set[str] = set()

    @property
    def num_plans(self) -> int:
        """Plans made so far: one per backend used and pair of declarations."""
        return self._book.num_plans

    @property
    def generation(self) -> int:
        """How many refit worlds have been built."""
        return self._generation

    @property
    def epoch(self) -> int:
        """Of the last attempt to build a world; goes up with each, and ranks refuse calls of an earlier one."""
        return self._epoch

    @property
    def lost(self) -> frozenset[str]:
        """Names of members that died or stopped answering and were not replaced yet."""
        return frozenset(self._lost)

    def plan(self, backend: Backend | None = None) -> Planned:
        """The plan for `backend` (the configured one if None), building the world if need be; moves no weights."""
        self._ensure_world()
        return self._book.plan_for(backend or self._config.backend)

    def refit(self, version: int, *, backend: Backend | None = None, verify: VerifyMode | None = None) -> RefitReport:
        """Bring every engine to the trainers' weights and publish them as `version`; `None` means as configured.

        Set-up apart, the ranks are waited for at most `deadline_s + grace_s`; publishing, and tearing down after a
        failure, take at most `2 * grace_s` each. Raises one RefitError naming every failing rank; afterwards no engine
        serves until a refit succeeds. Raises StateError while lost members are not replaced, DeclarationError or
        PlanError if the sides do not fit, ConfigError if ranks on other hosts could not reach the configured one.
        """
        backend = backend or self._config.backend
        start_s = time.perf_counter()
        self._ensure_world()
        planned = self._book.plan_for(backend)
        self._hand_out(backend, planned.plan.digest)
        order = RefitOrder(version, verify or self._config.verify, self._config.deadline_s, seed=version)
        moved = self._ask("refit", lambda _: {"order": order.to_plain()}, self._config.deadline_s)
        # Last of all, and only here: every rank of the world has finished.
        self._ask("publish", lambda _: {"version": version}, self._config.grace_s, Side.INFERENCE)
        return RefitReport.of(
            [outcome.value for outcome in moved.outcomes],
            backend=str(backend),
            seconds=time.perf_counter() - start_s,
            floor_s=planned.floor_s,
        )

    def replace(self, member: Member) -> None:
        """Put `member` in the place of the one with its name and side. The world is rebuilt by the next refit."""
        places = {old.name: first for first, old in self._seating.members.items() if old.side is member.side}
        if member.name not in places:
            raise StateError(f"no {member.side} member is called {member.name}; known are {', '.join(places)}")
        seated = [member if old.name == member.name else old for old in self._seating.members.values()]
        self._reseat(seated, {member.name})

    def replace_trainers(self, trainers: Sequence[Member]) -> None:
        """Put a new trainer group, of any size, in the place of the old one."""
        engines = list(self._seating.side(Side.INFERENCE).values())
        old = {member.name for member in self._seating.side(Side.TRAINER).values()}
        self._reseat([*trainers, *engines], old)

    def close(self) -> None:
        """Leave the refit world; engines keep serving what they serve. Members that died are passed over."""
        self._tear_down(failure=None)

    def _reseat(self, members: Sequence[Member], replaced: set[str]) -> None:
        seating = Seating.of(
            [member for member in members if member.side is Side.TRAINER],
            [member for member in members if member.side is Side.INFERENCE],
        )
        self._tear_down(failure=None)
        self._lost -= replaced
        self._seating = seating

    def _ensure_world(self) -> None:
        """Declare, plan and connect, unless a world stands."""
        if self._lost:
            raise StateError(f"lost and not replaced: {', '.join(sorted(self._lost))}")
        if self._world is not None:
            return
        self._epoch = next_epoch(self._epoch)
        trainers = self._declare(Side.TRAINER, specs=None)
        source = source_catalog({outcome.rank: outcome.value for outcome in trainers.outcomes})
        specs = [[spec.name, list(spec.shape), spec.dtype] for spec in source.specs.values()]
        engines = self._declare(Side.INFERENCE, specs)
        declared = [*trainers.outcomes, *engines.outcomes]
        hosts = {outcome.rank: outcome.value["host"] for outcome in declared}
        check_reachable(self._config.host, hosts.values())
        self._book.declare(source, [outcome.value["manifest"] for outcome in engines.outcomes], hosts)
        transport = self._choose_transport(declared, hosts)
        self._generation += 1
        self._world = WorldHost(
            self._seating, self._config.host, self._generation, self._config.deadline_s, str(transport)
        )
        world = self._world.to_plain()
        self._ask("connect", lambda _: {"world": world}, self._config.deadline_s)

    def _choose_transport(self, declared: Sequence[Outcome], hosts: Mapping[int, str]) -> TransportKind:
        reports = {outcome.rank: DeviceReport.from_plain(outcome.value["devices"]) for outcome in declared}
        choice = choose_transport(self._config.transport, reports, hosts, self._seating.rank_names())
        _LOG.info("refit transport: %s (%s)", choice.kind, choice.reason)
        environments = {outcome.rank: outcome.value["environment"] for outcome in declared}
        is_nccl = choice.kind is TransportKind.NCCL
        for warning in compare_environments(environments, self._seating.num_trainers, is_nccl=is_nccl):
            _LOG.warning("refit environment: %s", warning)
        return choice.kind

    def _declare(self, side: Side, specs: list[list[Any]] | None) -> Answers:
        self._joined |= self._seating.side(side)
        shared = Shared({"specs": specs, "num_trainers": self._seating.num_trainers})
        return self._ask("declare", None, self._config.setup_s, side, shared)

    def _hand_out(self, backend: Backend, digest: str) -> None:
        """Give all ranks the plan for `backend`, of `digest`, unless that is what they have."""
        if self._adopted == digest:
            return
        self._adopted = None
        assert self._world is not None
        handout = self._book.handout_for(backend, in_rounds=self._world.in_rounds)
        self._ask("adopt", handout.own, self._config.setup_s, shared=Shared(handout.shared))
        self._adopted = digest

    def _ask(
        self,
        operation: str,
        arguments: Callable[[int], Mapping[str, Any]] | None,
        deadline_s: float,
        side: Side | None = None,
        shared: Shared | None = None,
    ) -> Answers:
        """Ask everyone, or one side; see `ask`. A failure tears the world down and is raised as one RefitError."""
        answers = ask(
            self._seating.members if side is None else self._seating.side(side),
            operation,
            arguments or (lambda _: {}),
            epoch=self._epoch,
            deadline_s=deadline_s,
            grace_s=self._config.grace_s,
            call_off=None if self._world is None else self._world.call_off,
            shared=shared,
        )
        self._lost |= answers.dead | answers.silent
        if answers.failed:
            error = refit_error(operation, answers.outcomes, self._seating.rank_names())
            parting = self._tear_down(failure=str(error), unheard=answers.silent)
            written = any(outcome.written for outcome in [*answers.outcomes, *parting])
            error.before_first_write = operation != "publish" and not written
            raise error
        return answers

    def _tear_down(self, failure: str | None, unheard: AbstractSet[str] = frozenset()) -> list[Outcome]:
        """Have every member that can still answer leave the world; after a `failure`, engines stop serving.

        Members that were `unheard` in that failure are told and not waited for: should they wake up and do what they
        had been asked, publishing above all, they take it back at once. Returns the outcomes of the others.
        """
        asked = self._seating.members if failure is not None else self._joined
        self._joined = {}
        self._adopted = None
        try:
            return self._send_off(asked, failure, unheard)
        finally:
            # Even if the driver is interrupted here, or the cluster is gone: no port and no thread stays behind.
            if self._world is not None:
                self._world.close()
                self._world = None

    def _send_off(self, asked: Mapping[int, Member], failure: str | None, unheard: AbstractSet[str]) -> list[Outcome]:
        """Ask `asked` to leave; see `_tear_down`."""
        grace_s = self._config.grace_s
        for first, member in asked.items():
            if member.name in unheard:
                start(
                    first,
                    member,
                    "close",
                    lambda _: {"failure": failure},
                    epoch=self._epoch,
                    answer_within_s=grace_s,
                )
        answers = ask(
            {first: member for first, member in asked.items() if member.name not in self._lost},
            "close",
            lambda _: {"failure": failure},
            epoch=self._epoch,
            deadline_s=grace_s,
            grace_s=grace_s,
        )
        # A member that is busy with its own work, or still starting, leaves later: that is no reason to replace it.
        self._lost |= answers.dead
        return answers.outcomes
