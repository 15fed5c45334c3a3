"""ReshardWeightSynchronizer: what NeMo RL's training loops call to bring the engines up to date."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ray

from nemo_rl_reshard.errors import ConfigError, StateError
from nemo_rl_reshard.integrations.nemo_rl.members import EngineMember, PolicyMember
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlSection
from nemo_rl_reshard.integrations.nemo_rl.timing import (
    LOG,
    plan_summary,
    record_phases,
    scalars,
    standard_label,
    summary_line,
)
from nemo_rl_reshard.orchestration.controller import RefitController


class ReshardWeightSynchronizer:
    """NeMo RL's `WeightSynchronizer` over a RefitController. Any thread may call it; calls run one at a time."""

    def __init__(
        self, trainers: Sequence[PolicyMember], engines: Sequence[EngineMember], section: NemoRlSection
    ) -> None:
        self._trainers = list(trainers)
        self._engines = list(engines)
        self._section = section
        self._lock = threading.RLock()
        self._controller: RefitController | None = None
        self._version = 0
        self._stale = True
        self._failure: BaseException | None = None
        self._shut_down = False

    @property
    def is_stale(self) -> bool:
        """True until the first refit succeeded, while one runs, and after one that failed."""
        return self._stale

    def init_communicator(self) -> None:
        """Have both sides declare, make and prove the plan, connect all ranks, and log the plan's summary."""
        with self._lock:
            LOG.info(plan_summary(self._ready().plan()))

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> dict[str, float]:
        """Bring every engine to the trainers' weights; the numbers that NeMo RL logs as `refit/*`."""
        with self._lock:
            self._stale = True
            if kv_scales is not None:
                raise ConfigError("kv_scales: engines with a quantised key-value cache are not supported")
            try:
                with standard_label(timer):
                    self._version += 1
                    report = self._ready().refit(self._version)
            except Exception as error:
                self._failure = error
                LOG.error("refit %d failed, the engines hold no usable weights: %s", self._version, error)
                raise
            record_phases(timer, report)
            self._stale, self._failure = False, None
            LOG.info(summary_line(report))
            return scalars(report)

    def raise_if_failed(self) -> None:
        """Raise what the last refit raised."""
        if self._failure is not None:
            raise self._failure

    def shutdown(self) -> None:
        """Leave the refit world. Safe twice, and with dead actors."""
        with self._lock:
            self._shut_down = True
            if self._controller is not None:
                self._controller.close()
                self._controller = None

    def _ready(self) -> RefitController:
        if self._shut_down:
            raise StateError("this synchronizer was shut down: attach again")
        if self._controller is None:
            config = self._section.refit_config(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
            self._controller = RefitController(self._trainers, self._engines, config)
        return self._controller
