"""A private copy of the installed vLLM package: NeMo RL edits that package's files whenever a worker starts."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
from pathlib import Path


def installed_vllm() -> Path:
    """The folder of the vLLM package that would be imported; vLLM itself is not."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is not installed"
    assert spec.submodule_search_locations, "vLLM is not a package"
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def copy_vllm(package: Path, target: Path) -> Path:
    """Put a copy of `package` into folder `target` and return `target`, which belongs on PYTHONPATH.

    Python files are copied with their times, so that the bytecode beside them stays valid; the rest, half a gigabyte
    of libraries, is linked to.
    """

    def copy(source: str, destination: str) -> None:
        if source.endswith((".py", ".pyc")):
            shutil.copy2(source, destination)
        else:
            Path(destination).symlink_to(source)

    shutil.copytree(package, target / package.name, copy_function=copy)
    return target


def fingerprint(package: Path) -> str:
    """Changes with the name, the place or the text of any source file of `package`, and with files that appear."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(package)).encode())
            digest.update(path.read_bytes() if path.suffix == ".py" else str(path.stat().st_size).encode())
    return digest.hexdigest()
