"""A Python environment that holds torch, numpy, Ray and this package, and nothing else: what a stock worker may have.

Made from what is installed, without a network: links to the files of those distributions and of what they require.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import nemo_rl_reshard

HELD = ("torch", "numpy", "ray")


def build_worker_environment(folder: Path) -> Path:
    """Make the environment in `folder`; the path of its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    interpreter = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in _with_requirements(*HELD):
        for entry in _top_level_entries(distribution):
            link = packages / entry
            # Distributions may share a folder (a namespace): one link holds for all of them.
            if not link.exists():
                link.symlink_to(distribution.locate_file(entry))
    (packages / "nemo_rl_reshard").symlink_to(Path(nemo_rl_reshard.__file__).parent)
    return interpreter


def _with_requirements(*names: str) -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        found[key] = metadata.distribution(name)
        required = map(Requirement, found[key].requires or ())
        wanted += [other.name for other in required if other.marker is None or other.marker.evaluate({"extra": ""})]
    return list(found.values())


def _top_level_entries(distribution: metadata.Distribution) -> set[str]:
    """Files and folders of site-packages that the distribution owns, scripts and bytecode left out."""
    assert distribution.files, f"{distribution.name} does not say which files it consists of"
    return {file.parts[0] for file in distribution.files} - {"..", "__pycache__", "/"}
