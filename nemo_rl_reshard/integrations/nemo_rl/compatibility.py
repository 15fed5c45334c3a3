"""What this package cannot refit under NeMo RL: one table of rules, checked at start-up and printed in the docs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_rl_reshard.integrations.nemo_rl.settings import Settings


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing refused. `found` says what of it a configuration holds, or None; the rest is the row of the docs."""

    key: str
    refused: str
    why: str
    fix: str
    found: Callable[[Settings], str | None]


RULES: tuple[Rule, ...] = ()


def violations(settings: Settings) -> Iterator[str]:
    """One sentence for every rule that `settings` break: the key, what it holds, why that cannot be and the fix."""
    for rule in RULES:
        held = rule.found(settings)
        if held is not None:
            yield f"{rule.key}: {held}: {rule.why}; {rule.fix}"
