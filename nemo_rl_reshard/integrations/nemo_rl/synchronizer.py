"""ReshardWeightSynchronizer: what NeMo RL's training loops call to bring the engines up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ray

from nemo_rl_reshard.errors import ConfigError, DeclarationError, PlanError, RefitError, StateError
from nemo_rl_reshard.integrations.nemo_rl.fallback import OwnRefit
from nemo_rl_reshard.integrations.nemo_rl.idle import (
    check_still_idle,
    drop_caches,
    drop_encoder_outputs,
    wait_until_idle,
)
from nemo_rl_reshard.integrations.nemo_rl.members import EngineMember, PolicyMember
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlSection, OnFailure
from nemo_rl_reshard.integrations.nemo_rl.timing import (
    LOG,
    plan_summary,
    record_phases,
    scalars,
    show_log,
    standard_label,
    summary_line,
)
from nemo_rl_reshard.orchestration.controller import RefitController
from nemo_rl_reshard.runtime.report import RefitReport


class ReshardWeightSynchronizer:
    """NeMo RL's `WeightSynchronizer` over a RefitController. Any thread may call it; calls run one at a time.

    Pickled into another process (an actor that runs the training loop, say), a copy builds a refit world of its own
    at its first refit, and the ranks leave the one they were in. A copy that never refits touches no actor.

    As a context manager it raises at the end what the last refit raised, unless an error is on its way already:
    NeMo RL's asynchronous loop prints a failure of its first refit and returns as if the training had ended.
    """

    def __init__(
        self,
        trainers: Sequence[PolicyMember],
        engines: Sequence[EngineMember],
        section: NemoRlSection,
        *,
        architecture: str | None = None,
        in_flight: bool = False,
        own_refit: OwnRefit | None = None,
    ) -> None:
        """Set nothing up yet. `architecture` of the model where the section names none.

        `in_flight`: the loop refits engines that are generating, and says itself when caches are dropped. `own_refit`
        is NeMo RL's way, for a section with `on_failure: fall_back`.
        """
        self._trainers = list(trainers)
        self._engines = list(engines)
        self._section = section
        self._architecture = section.architecture or architecture
        self._in_flight = in_flight
        self._own_refit = own_refit if section.on_failure is OnFailure.FALL_BACK else None
        self._lock = threading.RLock()
        self._controller: RefitController | None = None
        self._epoch = 0
        self._version = 0
        self._stale = True
        self._may_be_mixed = False
        self._has_fallen_back = False
        self._failure: BaseException | None = None
        self._is_shut_down = False
        self._setup_s: dict[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["_lock"]
        state["_controller"] = None
        state["_epoch"] = self._epoch if self._controller is None else self._controller.epoch
        state["_failure"] = None
        if self._own_refit is not None and not self._own_refit.travels:
            state["_own_refit"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.RLock()

    def __enter__(self) -> ReshardWeightSynchronizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.raise_if_failed()

    @property
    def is_stale(self) -> bool:
        """True until the first refit succeeded, while one runs, and after one that failed."""
        return self._stale

    @property
    def setup_metrics(self) -> dict[str, float]:
        """Seconds of setting up, by name; NeMo RL's logger takes them with `step=0, prefix="timing/setup"`."""
        return dict(self._setup_s)

    def note_setup(self, name: str, seconds: float) -> None:
        """Add what a step of setting up took to `setup_metrics`."""
        self._setup_s[name] = seconds

    def init_communicator(self) -> None:
        """Have both sides declare, make and prove the plan, connect all ranks, and log the plan's summary.

        Raises DeclarationError, PlanError, ConfigError or RefitError if the two sides do not fit or do not meet.
        """
        with self._lock:
            start_s = time.perf_counter()
            try:
                planned = self._ready().plan()
            except Exception as error:
                self._fail(error, "setting up refits failed")
                raise
            self.note_setup("reshard_init_time_s", time.perf_counter() - start_s)
            LOG.info(plan_summary(planned, str(self._section.backend)))

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> dict[str, float]:
        """Bring every engine to the trainers' weights; returns the numbers that NeMo RL logs as `refit/*`.

        Raises RefitError, a RuntimeError, if a rank failed; the engines then hold no usable weights unless it says
        `before_first_write`. With `on_failure: fall_back` such a failure is a warning, and NeMo RL's own refit runs
        from then on. Raises StateError after `shutdown`, while dead members are not replaced and for `kv_scales`, and
        what `init_communicator` raises when the world has to be built anew.
        """
        with self._lock:
            self._stale = True
            if self._has_fallen_back:
                return self._refit_otherwise(timer)
            self._version += 1
            try:
                _refuse(kv_scales)
                with standard_label(timer):
                    report = self._refit()
            except Exception as error:
                if not self.may_fall_back(error):
                    self._fail(error, f"refit {self._version} failed, the engines must not be used until one succeeds")
                    raise
                LOG.warning("refit %d failed before anything was written: %s", self._version, error)
                self.fall_back()
            else:
                record_phases(timer, report)
                LOG.info(summary_line(report))
                self._stale, self._failure, self._may_be_mixed = False, None, False
                return scalars(report)
            return self._refit_otherwise(timer)

    def may_fall_back(self, error: Exception) -> bool:
        """Whether NeMo RL's own refit is to follow `error`: asked for, nothing written, and nobody lost."""
        lost = self._controller.lost if self._controller is not None else frozenset()
        return (
            self._own_refit is not None
            and not (self._may_be_mixed or lost)
            and (isinstance(error, DeclarationError | PlanError | ConfigError) or _is_unwritten(error))
        )

    def fall_back(self) -> None:
        """Leave refits to NeMo RL for good."""
        LOG.warning("on_failure: fall_back: NeMo RL's own refit takes over and stays")
        self._has_fallen_back = True
        self._failure = None
        self.leave()

    def raise_if_failed(self) -> None:
        """Raise what the last refit, or setting up, raised; nothing if it went well."""
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Leave the refit world, if this process built one: ranks drop plan and buffers. The next refit builds anew.

        Dead actors are passed over, and so is a Ray that was shut down.
        """
        with self._lock:
            if self._controller is None:
                return
            controller, self._controller = self._controller, None
            self._epoch = controller.epoch
            try:
                controller.close()
            except Exception as error:
                # What is left of the world ends with its processes; whoever shuts down has nothing to gain by knowing.
                # While the interpreter ends, this module's own names may be gone already.
                if LOG is not None:
                    LOG.debug("leaving the refit world: %s", error)

    def shutdown(self) -> None:
        """Leave the refit world for good. Safe twice, with dead actors, and while the interpreter ends."""
        with self._lock:
            self._is_shut_down = True
            self.leave()

    def _refit(self) -> RefitReport:
        """One refit between two proofs that no engine works on requests."""
        controller = self._ready()
        grace_s = self._section.grace_s
        controller.plan()  # builds the world if there is none, which may take long: before engines are found idle
        if not self._in_flight:
            wait_until_idle(self._engines, grace_s)
        report = controller.refit(self._version)
        if not self._in_flight:
            check_still_idle(self._engines, grace_s)
            drop_caches(self._engines, grace_s)
        drop_encoder_outputs(self._engines, grace_s)
        return report

    def _refit_otherwise(self, timer: Any) -> dict[str, float]:
        if self._own_refit is None:
            raise StateError("refits were left to NeMo RL in the process that attached: ask it there")
        try:
            numbers = self._own_refit.take_over(timer)
        except Exception as error:
            self._fail(error, "NeMo RL's own refit, fallen back to, failed as well")
            raise
        self._stale, self._failure = False, None
        return numbers

    def _fail(self, error: Exception, what: str) -> None:
        """At once and at error level: the loop may catch what is raised here, print it and go on."""
        self._failure = error
        self._may_be_mixed |= isinstance(error, RefitError) and not error.before_first_write
        LOG.error("%s: %s", what, error)

    def _ready(self) -> RefitController:
        if self._is_shut_down:
            raise StateError("this synchronizer was shut down: attach again")
        if self._controller is None:
            show_log()
            # Here, and not where the synchronizer was made: the host is that of the process that drives the refits.
            host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
            config = self._section.refit_config(host).model_copy(update={"architecture": self._architecture})
            self._controller = RefitController(self._trainers, self._engines, config, epoch=self._epoch)
        return self._controller


def _refuse(kv_scales: dict[str, float] | None) -> None:
    if kv_scales is not None:
        raise StateError(
            "sync_weights was given kv_scales, and engines with a quantised key-value cache are not supported: set "
            "policy.generation.vllm_cfg.kv_cache_dtype to auto"
        )


def _is_unwritten(error: Exception) -> bool:
    return isinstance(error, RefitError) and error.before_first_write
