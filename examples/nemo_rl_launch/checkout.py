"""Where NeMo RL and this repository lie, made known to recipes and to the processes that Ray starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nemo_rl_reshard.cli.nemo_rl_probe import find_nemo_rl
from nemo_rl_reshard.cli.requirements import EnvironmentLacksError, require

VARIABLE = "NEMO_RL"
BASE_CONFIG = Path("examples", "configs", "grpo_math_1B.yaml")
ROOT = Path(__file__).resolve().parents[2]
"""What workers put on their path to import nemo_rl_reshard; holds no other package that they could meet instead."""


def use_checkout() -> Path:
    """Find NeMo RL, set NEMO_RL for the recipes' `defaults`, and have workers find this package.

    The variable wins, and is put on the path where no NeMo RL is installed; without it, NeMo RL's package says where
    its checkout is. Must come before Ray starts, because workers inherit this environment. Raises EnvironmentLacksError
    if NeMo RL is missing, is the package index's placeholder, or came without its configuration files.
    """
    given = os.environ.get(VARIABLE)
    found = find_nemo_rl()
    if given is not None:
        root = Path(given).resolve()
        _require_configs(root, f"{VARIABLE}={given}")
        if found is None or not found.is_real:
            _put_on_path(root)
    require("nemo-rl", "ray")
    if given is None:
        assert found is not None, "require found it"
        root = found.folder.resolve().parent
        _require_configs(root, f"NeMo RL is installed in {root}, which")
    os.environ[VARIABLE] = str(root)
    _put_on_path(ROOT)
    return root


def _require_configs(root: Path, where: str) -> None:
    if not (root / BASE_CONFIG).is_file():
        raise EnvironmentLacksError(
            f"{where} has no {BASE_CONFIG}; set {VARIABLE} to a checkout of github.com/NVIDIA-NeMo/RL"
        )


def _put_on_path(root: Path) -> None:
    """First on the path, for this process and for all it starts."""
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    present = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(root) not in present:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), *present]))
