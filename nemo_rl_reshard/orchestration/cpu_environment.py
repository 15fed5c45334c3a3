"""The environment variables under which vLLM's CPU build runs inside Ray actors, for a Ray `runtime_env`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuEnvironment:
    """vLLM reads these while it is imported, so they belong into the actors' runtime environment.

    `kv_cache_gib` is per engine worker. `python_path` is put in front of the actors' import path (a plugin folder,
    say). `num_threads` counts OpenMP threads per process. `others` are further variables, such as a plugin's own.
    """

    kv_cache_gib: int = 1
    num_threads: int = 1
    python_path: Sequence[Path] = ()
    others: Mapping[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Name -> value, all of them text, as Ray wants them."""
        variables = {
            # Engine core in the actor's own process: one process less, and a single worker may run in process too.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The default binds each worker to a NUMA node of its own and refuses two workers on a one-node machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.num_threads),
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            # No warm-up: a tiny model starts in seconds without it.
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.python_path:
            variables["PYTHONPATH"] = ":".join(str(folder) for folder in self.python_path)
        return {**variables, **self.others}

    def runtime_env(self) -> dict[str, dict[str, str]]:
        """What `ray.init(runtime_env=...)` or an actor's options take."""
        return {"env_vars": self.variables()}
