"""ServingGate: whether an engine may generate, may be refitted, and which version it serves. Published last."""

from __future__ import annotations

from nemo_rl_reshard.errors import StateError, TargetError


class ServingGate:
    """Closed until a full refit succeeded; closes when a refit begins and opens only when its version is published.

    A failed refit therefore needs no call to close it. Weights that were thrown away in sleep close it too.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._version: int | None = None
        self._finished: int | None = None
        self._why_closed = "no refit has succeeded since it started"
        self._asleep = False
        self._broken: str | None = None

    @property
    def version(self) -> int | None:
        """The version served, None while the gate is closed."""
        return self._version

    def check_may_generate(self) -> int:
        """The version that a generation now would come from. Raises StateError if there must be none."""
        self._check_whole()
        if self._asleep:
            raise StateError(f"{self._name} is asleep: wake it up before generating")
        if self._version is None:
            raise StateError(f"{self._name} has no usable weights ({self._why_closed}): run a full refit first")
        return self._version

    def begin_refit(self, num_unfinished: int) -> None:
        """Close for a refit. Raises TargetError if the engine sleeps or still works on requests, StateError if broken.

        `num_unfinished` requests are in the engine; a step of theirs during the refit would mix two versions.
        """
        self.check_idle(num_unfinished)
        self._close("its last refit did not finish")

    def check_idle(self, num_unfinished: int) -> None:
        """Raise unless the engine is awake, whole and without requests; asked before a refit and again inside it."""
        self._check_whole()
        if self._asleep:
            raise TargetError(f"{self._name} is asleep, its weights are not in place: wake it up before the refit")
        if num_unfinished:
            raise TargetError(f"{self._name} still has {num_unfinished} unfinished requests: drain or abort them first")

    def finish_refit(self, version: int) -> None:
        """Note that this engine holds all of `version`; whether the others do is not known yet."""
        self._finished = version

    def publish(self, version: int) -> None:
        """Open for `version`: every rank of the world has finished.

        Raises StateError if the engine is broken, or does not hold `version` now: it was restarted, went to sleep or
        was taken out of service after the refit.
        """
        self._check_whole()
        if self._finished != version:
            raise StateError(f"{self._name} does not hold version {version} ({self._why_closed}): run a full refit")
        self._version = version

    def retract(self, why: str) -> None:
        """Close although a refit had succeeded here: it failed elsewhere, or the weights are known to be wrong."""
        self._close(why)

    def fall_asleep(self, *, weights_lost: bool) -> None:
        """Remember that the engine sleeps; `weights_lost` when waking will not bring its weights back."""
        self._asleep = True
        if weights_lost:
            self._close("sleep threw its weights away")

    def wake(self) -> None:
        """Remember that the engine is awake again."""
        self._asleep = False

    def break_down(self, why: str) -> None:
        """Remember that the engine can never be used again; it has to be replaced."""
        self._broken = why
        self._close(why)

    def _close(self, why: str) -> None:
        self._version = None
        self._finished = None
        self._why_closed = why

    def _check_whole(self) -> None:
        if self._broken is not None:
            raise StateError(f"{self._name} is broken ({self._broken}): replace it")
