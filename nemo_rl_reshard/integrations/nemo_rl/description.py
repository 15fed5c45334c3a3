"""What a worker tells about itself when the plugin is attached, before anything of the refit is set up."""

from __future__ import annotations

from typing import Any

from nemo_rl_reshard import __version__


def describe(worker: Any) -> dict[str, Any]:
    """Plain facts about the process of `worker`, a policy worker or a vLLM worker, and which rank it takes itself for.

    `architecture` is the model's, as its transformers-like configuration names it, or None; `rank` is -1 where there
    is none. Raises nothing.
    """
    named = getattr(getattr(getattr(worker, "model", None), "config", None), "architectures", None)
    return {
        "rank": int(getattr(worker, "rank", -1)),
        "kind": type(worker).__name__,
        "architecture": str(named[0]) if named else None,
        "package": __version__,
    }
