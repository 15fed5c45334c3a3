"""ServedRanks: the inference side of a refit as one actor sees it, whatever engine it holds. Serves or refuses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_rl_reshard.errors import ReshardError, TargetError
from nemo_rl_reshard.orchestration.epoch import EpochFence
from nemo_rl_reshard.orchestration.outcome import Fault, Outcome
from nemo_rl_reshard.orchestration.serving_gate import ServingGate

PlainOutcome = dict[str, Any]


class ServedRanks(ABC):
    """An actor's base: the gate in front of its engine, and the operations of the controller.

    Calls of an actor run one at a time, so a refit never meets a generation of the same actor; requests that reached
    the engine by another way are refused by the idle check. A refit blocks the actor and can still be called off,
    since that travels through the refit's store.
    """

    def __init__(self, name: str) -> None:
        self.gate = ServingGate(name)
        self._name = name
        self._fence = EpochFence()

    @abstractmethod
    def on_ranks(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None
    ) -> list[PlainOutcome]:
        """Have every rank of the engine `perform` the operation: one argument and one plain outcome per rank.

        `shared` is part of every rank's argument and apart so that it is passed on once.
        """

    @abstractmethod
    def num_unfinished(self) -> int:
        """Requests that the engine has accepted and not finished."""

    @abstractmethod
    def reset_caches(self) -> bool:
        """Forget what old weights computed, prefixes above all; False if the engine did not."""

    def version(self) -> int | None:
        """The version served, None while the engine must not generate."""
        return self.gate.version

    def publish(self, version: int) -> None:
        """Open the gate for what the last refit brought; an engine that tags its outputs is told the version too."""
        self.gate.publish(version)

    def reshard(
        self, operation: str, arguments: Sequence[dict[str, Any]], shared: Mapping[str, Any] | None = None
    ) -> list[PlainOutcome]:
        """Perform one operation of the controller."""
        try:
            self._admit(operation, arguments[0])
        except ReshardError as error:
            # Answered, not raised: no rank was asked, so none has written.
            return [Outcome(int(argument["rank"]), None, Fault.of(error)).to_plain() for argument in arguments]
        if operation == "publish":
            self.publish(int(arguments[0]["version"]))
            return [Outcome(int(argument["rank"])).to_plain() for argument in arguments]
        outcomes = self.on_ranks(operation, arguments, shared)
        if operation == "refit" and not any("fault" in outcome for outcome in outcomes):
            self._settle(int(arguments[0]["order"]["version"]))
        return outcomes

    def _admit(self, operation: str, argument: dict[str, Any]) -> None:
        """Raise unless this is about the present world, and an engine that is to be refitted stands still."""
        epoch = int(argument["epoch"])
        if operation == "declare":
            self._fence.declare(self._name, epoch)
        elif operation == "close":
            if self._fence.leave(epoch) and argument["failure"] is not None:
                self.gate.retract("a refit failed and none has succeeded since")
        else:
            self._fence.check(self._name, operation, epoch)
        if operation == "refit":
            self.gate.begin_refit(self.num_unfinished())

    def _settle(self, version: int) -> None:
        """After every rank has finished: nothing ran meanwhile, and nothing of the old weights is left."""
        self.gate.check_idle(self.num_unfinished())
        # Blocks computed by the old weights would be reused for any prompt that shares a prefix with an old one.
        if not self.reset_caches():
            raise TargetError("the engine did not reset its prefix cache: old keys and values would be reused")
        self.gate.finish_refit(version)
