"""Wait for one answer from each of several actors, with one deadline, and keep what went wrong by name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayError, RayTaskError


@dataclass
class Collected:
    """What was answered, and why not, by whom; `raised` are those of the failures whose actor lives and refused."""

    answers: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    raised: set[str] = field(default_factory=set)


def collect(references: Mapping[str, ObjectRef[Any]], within_s: float) -> Collected:
    """Wait for all of `references` at most `within_s` seconds. Raises nothing: deaths and silence are failures."""
    found = Collected()
    end_s = time.monotonic() + within_s
    if references:
        ray.wait(list(references.values()), num_returns=len(references), timeout=within_s)
    for name, reference in references.items():
        try:
            found.answers[name] = ray.get(reference, timeout=max(0.1, end_s - time.monotonic()))
        except GetTimeoutError:
            found.failures[name] = f"gave no answer within {within_s:g} s"
        except RayTaskError as error:
            found.failures[name] = f"{type(error.cause).__name__}: {error.cause}"
            found.raised.add(name)
        except RayError as error:
            found.failures[name] = f"its actor is gone: {str(error).strip().splitlines()[0]}"
    return found
