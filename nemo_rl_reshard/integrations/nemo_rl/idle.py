"""Engines stand still while their weights change, and forget what the old weights computed."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray import ObjectRef

from nemo_rl_reshard.errors import RefitError
from nemo_rl_reshard.integrations.nemo_rl.answers import Collected, collect
from nemo_rl_reshard.integrations.nemo_rl.engine_rank import forget_old_weights, num_unfinished
from nemo_rl_reshard.integrations.nemo_rl.members import EngineMember

POLL_S = 0.05


def wait_until_idle(engines: Sequence[EngineMember], within_s: float) -> None:
    """Return once no engine has a request; what is about to finish gets `within_s` seconds.

    A step of the engine between two writes would mix two versions. Raises RefitError naming the engines that are
    busy, dead or silent.
    """
    end_s = time.monotonic() + within_s
    while True:
        found = _unfinished(engines, max(0.0, end_s - time.monotonic()))
        if not found.answers and not found.failures:
            return
        if found.failures or time.monotonic() + POLL_S >= end_s:
            raise _error("engines were not idle before the refit", found, before_first_write=not found.failures)
        threading.Event().wait(POLL_S)


def check_still_idle(engines: Sequence[EngineMember], within_s: float) -> None:
    """Raise RefitError if a request reached an engine during the refit: its outputs would mix two versions."""
    found = _unfinished(engines, within_s)
    if found.answers or found.failures:
        raise _error("engines took up requests during the refit", found, before_first_write=False)


def drop_caches(engines: Sequence[EngineMember], within_s: float) -> None:
    """Have idle engines drop their prefix caches, whose keys and values the old weights computed.

    Asynchronous engines are asked the way NeMo RL asks them, since their own call is a coroutine. Raises RefitError.
    """
    references: dict[str, ObjectRef[Any]] = {}
    for engine in engines:
        if engine.is_async:
            references[engine.name] = engine.handle.reset_prefix_cache_async.remote()
        elif engine.takes_functions:
            references[engine.name] = engine.on_actor(forget_old_weights)
        else:
            references[engine.name] = engine.handle.reset_prefix_cache.remote()
    _all_did(references, within_s, "engines kept caches of the old weights")


def drop_encoder_outputs(engines: Sequence[EngineMember], within_s: float) -> None:
    """What NeMo RL's own refit does last on asynchronous engines: drop encoder outputs, if configured to."""
    name = "_reset_encoder_cache_after_weight_update"
    references = {
        engine.name: getattr(engine.handle, name).remote()
        for engine in engines
        if engine.is_async and hasattr(engine.handle, name)
    }
    _all_did(references, within_s, "engines kept encoder outputs of the old weights")


def _unfinished(engines: Sequence[EngineMember], within_s: float) -> Collected:
    """How many requests the engines have that have any. Where no function can be run, the loop's own waiting counts."""
    found = collect({each.name: each.on_actor(num_unfinished) for each in engines if each.takes_functions}, within_s)
    found.answers = {name: f"{count} unfinished requests" for name, count in found.answers.items() if count}
    return found


def _all_did(references: Mapping[str, ObjectRef[Any]], within_s: float, otherwise: str) -> None:
    found = collect(references, within_s)
    found.answers.clear()
    if found.failures:
        raise _error(otherwise, found, before_first_write=False)


def _error(what: str, found: Collected, *, before_first_write: bool) -> RefitError:
    """What is not known counts as written."""
    why = {**found.failures, **found.answers}
    lines = [what, *(f"{name}: {reason}" for name, reason in why.items())]
    return RefitError("\n  - ".join(lines), why, {}, before_first_write)
