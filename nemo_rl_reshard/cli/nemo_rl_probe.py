"""The NeMo RL that this environment would import, told from the empty package of that name by what it contains."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import util
from pathlib import Path

# Read, not imported: importing NeMo RL takes its whole environment, starts git and configures logging.
_CONTENT = ("algorithms/grpo.py", "weight_sync/interfaces.py")
_VERSION_FILE = "package_info.py"


@dataclass(frozen=True, slots=True)
class NemoRl:
    """The package found: where, what it calls itself (`major.minor.patch`, None if it does not say), and if it is real.

    The package index holds a 0.0.0 under this name that consists of `__init__.py` and `package_info.py`.
    """

    folder: Path
    version: str | None
    is_real: bool


def find_nemo_rl() -> NemoRl | None:
    """The NeMo RL first on the path, installed or a checkout; None if there is none."""
    spec = util.find_spec("nemo_rl")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    return NemoRl(folder, _version(folder / _VERSION_FILE), all((folder / name).is_file() for name in _CONTENT))


def _version(file: Path) -> str | None:
    try:
        statements = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return None
    numbers = {
        target.id: statement.value.value
        for statement in statements
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    parts = [numbers.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    return None if None in parts else ".".join(map(str, parts))
