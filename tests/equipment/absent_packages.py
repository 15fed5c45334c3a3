"""Stand-ins for packages that a module imports and that what is tested does not use: every name in them exists."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _StandIns(MetaPathFinder, Loader):
    """Finds every module of the given packages, none of which has any code."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self._packages else None

    def exec_module(self, module: ModuleType) -> None:
        made: dict[str, MagicMock] = {}

        def attribute(name: str) -> MagicMock:
            if name.startswith("__"):
                raise AttributeError(name)
            return made.setdefault(name, MagicMock(name=f"{module.__name__}.{name}"))

        module.__getattr__ = attribute  # type: ignore[method-assign]


def stand_in_for(*packages: str) -> None:
    """Let those of `packages` that are not installed be imported from here on."""
    absent = tuple(package for package in packages if importlib.util.find_spec(package) is None)
    if absent:
        sys.meta_path.append(_StandIns(absent))
