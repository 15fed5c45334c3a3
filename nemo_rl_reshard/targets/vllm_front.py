"""What the front end of a vLLM engine does around a refit: forget what old weights computed, then say the version."""

from __future__ import annotations

from typing import Any

from nemo_rl_reshard.errors import TargetError


def reset_caches(llm: Any) -> None:
    """Drop every cache that holds results of the old weights: prefixes, images, encoder outputs.

    Short prompts hide a forgotten prefix cache, since only whole blocks are cached. Raises TargetError if the engine
    keeps its prefix cache because requests still use it.
    """
    if not llm.reset_prefix_cache():
        raise TargetError("the engine keeps its prefix cache: requests are still running; drain or abort them first")
    for owner, call in ((llm, "reset_mm_cache"), (llm.llm_engine, "reset_encoder_cache")):
        reset = getattr(owner, call, None)
        if reset is not None:
            reset()


def publish_version(llm: Any, version: int) -> None:
    """Tell the engine which version it serves, so that it tags its outputs. The last step of a refit.

    Nothing to tell a release that does not tag outputs (0.25).
    """
    update = getattr(llm, "update_weight_version", None)
    if update is not None:
        update(str(version))


def published_version(llm: Any) -> int | None:
    """The version last published, None before the first, or if the release does not keep it (0.25)."""
    get = getattr(llm, "get_weight_version", None)
    version = str(get()) if get is not None else ""
    return int(version) if version.isdigit() else None
