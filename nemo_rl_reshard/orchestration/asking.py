"""Ask every member of both sides at once and wait for all of them together, with one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from nemo_rl_reshard.errors import RefitAbortedError
from nemo_rl_reshard.orchestration.member import Member
from nemo_rl_reshard.orchestration.outcome import DIED, SILENT, Fault, Outcome
from nemo_rl_reshard.orchestration.shared import Shared
from nemo_rl_reshard.params.manifest import Side

WRITING = ("refit", "publish")
"""Operations in and after which an engine may hold other weights than before."""


@dataclass
class Answers:
    """Outcome of every rank, ascending; and by name the members of which a rank is dead, or did not answer."""

    outcomes: list[Outcome] = field(default_factory=list)
    dead: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        """Whether any rank has a fault."""
        return any(outcome.fault is not None for outcome in self.outcomes)

    def add(self, member: Member, outcomes: Sequence[Outcome]) -> None:
        """Take what the ranks of `member` answered, or what is answered for them."""
        self.outcomes += outcomes
        kinds = {outcome.fault.kind for outcome in outcomes if outcome.fault is not None}
        if DIED in kinds:
            self.dead.add(member.name)
        if SILENT in kinds:
            self.silent.add(member.name)


def ask(
    members: Mapping[int, Member],
    operation: str,
    arguments: Callable[[int], Mapping[str, Any]],
    *,
    epoch: int,
    deadline_s: float,
    grace_s: float,
    call_off: Callable[[str], None] | None = None,
    shared: Shared | None = None,
) -> Answers:
    """Have every member perform `operation`; `members` maps the first rank each of them carries to the member.

    `arguments(rank)` is the plain argument of one rank, `shared` what all are told besides; `epoch` says which world
    it is about. Returns when all have answered, at the latest `deadline_s + grace_s` after the call. The first fault
    calls the others off through `call_off`, which must reach ranks that are blocked; from then on they have `grace_s`
    to answer. Whom nothing could call off is not called silent for having been slower than that. Raises nothing: every
    failure, an actor's death and silence included, becomes the fault of the ranks concerned.
    """
    end_s = time.monotonic() + deadline_s + grace_s
    answers = Answers()
    waiting: dict[ray.ObjectRef[Any], tuple[int, Member]] = {}
    for first, member in members.items():
        within_s = deadline_s + grace_s / 2
        reference = start(first, member, operation, arguments, epoch=epoch, answer_within_s=within_s, shared=shared)
        waiting[reference] = (first, member)
    called_off = False
    while waiting and (left_s := end_s - time.monotonic()) > 0:
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=left_s)
        for reference in ready:
            first, member = waiting.pop(reference)
            answers.add(member, _read(reference, first, member, operation, max(1.0, end_s - time.monotonic())))
        if answers.failed and not called_off:
            called_off = True
            end_s = min(end_s, time.monotonic() + grace_s)
            if call_off is not None:
                fault = next(outcome for outcome in answers.outcomes if outcome.fault is not None)
                call_off(f"rank {fault.rank} failed in {operation}: {fault.fault}")
    unheard = Fault(SILENT, f"gave no answer to {operation}")
    if called_off and call_off is None:
        unheard = Fault(RefitAbortedError.__name__, f"had not answered to {operation} when another rank failed")
    for first, member in waiting.values():
        answers.add(member, _same(first, member, operation, unheard))
    if waiting and not called_off and call_off is not None:
        call_off(f"{', '.join(member.name for _, member in waiting.values())} gave no answer to {operation}")
    answers.outcomes.sort(key=lambda outcome: outcome.rank)
    return answers


def start(
    first: int,
    member: Member,
    operation: str,
    arguments: Callable[[int], Mapping[str, Any]],
    *,
    epoch: int,
    answer_within_s: float,
    shared: Shared | None = None,
) -> ray.ObjectRef[Any]:
    """Have the member whose first rank is `first` perform `operation`, and do not wait; see `ask`."""
    common = {"epoch": epoch, "answer_within_s": answer_within_s}
    ranks = range(first, first + member.num_ranks)
    return member.submit(operation, [{**arguments(rank), **common, "rank": rank} for rank in ranks], shared)


def _read(reference: ray.ObjectRef[Any], first: int, member: Member, operation: str, timeout_s: float) -> list[Outcome]:
    """Outcomes behind a reference that is ready."""
    try:
        plain: Sequence[Mapping[str, Any]] = ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        # Answered, but the answer did not cross the cluster in time.
        return _same(first, member, operation, Fault(SILENT, "its answer could not be fetched in time"))
    except RayTaskError as error:
        # The actor lives, but something outside the ranks' own operations raised.
        return _same(first, member, operation, Fault(type(error.cause).__name__, str(error.cause)))
    except RayError as error:
        return _same(first, member, operation, Fault(DIED, f"its actor is gone: {_first_line(error)}"))
    try:
        found = [Outcome.from_plain(answer) for answer in plain]
    except (KeyError, TypeError, ValueError) as error:
        return _same(first, member, operation, Fault("HandshakeError", f"answered what is no outcome: {error!r}"))
    if [outcome.rank for outcome in found] != list(range(first, first + member.num_ranks)):
        odd = [outcome.rank for outcome in found]
        fault = Fault("HandshakeError", f"answered for ranks {odd}, asked for {member.num_ranks} from {first} on")
        return _same(first, member, operation, fault)
    return found


def _same(first: int, member: Member, operation: str, fault: Fault) -> list[Outcome]:
    """What is answered for ranks that did not. Unknown is written, but not where an engine died unasked to write."""
    written = member.side is Side.INFERENCE and not (fault.kind == DIED and operation not in WRITING)
    return [Outcome(rank, None, fault, written=written) for rank in range(first, first + member.num_ranks)]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
