"""Names read from source files, held against what an import of the same package finds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from nemo_rl_reshard.cli.source_names import SourceNames

FILES = {
    "__init__.py": "",
    "base.py": """
        class Base:
            async def asked(self): ...
            @property
            def stale(self): ...
    """,
    "deep/__init__.py": "from specimen.base import Base as Renamed",
    "work.py": """
        import json as read
        from specimen.deep import Renamed
        LIMIT: int = 3
        if LIMIT:
            def chosen():
                hidden = 1
        try:
            from nowhere_at_all import absent
        except ImportError:
            absent = None
        class Worker(Renamed):
            kind = "x"
            def __init__(self):
                self.synchronizer: object = None
                self.other, self.third = 1, 2
    """,
}
PRESENT = [
    "LIMIT",
    "chosen",
    "absent",
    "Worker",
    "Renamed",
    "read",
    "Worker.kind",
    "Worker.__init__",
    "Worker.asked",
    "Worker.stale",
]
SET_ON_SELF = ["Worker.synchronizer", "Worker.other", "Worker.third"]
MISSING = ["hidden", "json", "Work", "Worker.Worker", "Worker.hidden", "LIMIT.real_member", "chosen.hidden"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "specimen" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()))
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "specimen"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "specimen"


@pytest.mark.parametrize("name", PRESENT + MISSING)
def test_what_is_read_is_what_an_import_would_find(folder: Path, name: str) -> None:
    owner, _, member = name.partition(".")
    found = importlib.import_module("specimen.work")
    assert (hasattr(found, owner) and (not member or hasattr(getattr(found, owner), member))) is (name in PRESENT)
    assert SourceNames(folder).defines("specimen.work", name) is (name in PRESENT)


@pytest.mark.parametrize("name", SET_ON_SELF)
def test_attributes_that_an_object_gets_count_too(folder: Path, name: str) -> None:
    assert SourceNames(folder).defines("specimen.work", name)


@pytest.mark.parametrize("module", ["specimen.gone", "specimen.deep.gone", "elsewhere"])
def test_a_module_that_is_not_there_defines_nothing(folder: Path, module: str) -> None:
    assert not SourceNames(folder).defines(module, "Worker")
