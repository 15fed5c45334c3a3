"""NeMo RL's own refit, for `on_failure: fall_back`: what brings the engines up to date when this package cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class OwnRefit(Protocol):
    """One of NeMo RL's own ways. `travels` says whether it may be pickled into another process."""

    travels: bool

    def take_over(self, timer: Any) -> dict[str, float]:
        """Refit now, and from now on; `timer` is NeMo RL's, or None."""


@dataclass
class LoopRefit:
    """What `refit_policy_generation` does for a generation without a synchronizer: gather, broadcast, load.

    Does not travel: a copy of `policy` shuts the trainers down when it is collected.
    """

    policy: Any
    policy_generation: Any
    travels: bool = False

    def take_over(self, timer: Any) -> dict[str, float]:
        """See `OwnRefit`. The loop asks NeMo RL itself from the next refit on."""
        from nemo_rl.algorithms.grpo import refit_policy_generation

        self.policy_generation.weight_synchronizer = None
        return refit_policy_generation(self.policy, self.policy_generation, False, timer=timer) or {}


@dataclass
class ReplacedSynchronizer:
    """The synchronizer that NeMo RL had made, for a loop that keeps asking the one that replaced it."""

    original: Any
    travels: bool = True

    def take_over(self, timer: Any) -> dict[str, float]:
        """See `OwnRefit`."""
        return self.original.sync_weights(timer=timer) or {}
