"""Run the nemo-rl-reshard command in this process and catch its exit code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_rl_reshard.cli.app import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def faults(self) -> list[str]:
        """The faults that a bad-input message lists."""
        return self.err.rstrip().split("\n  - ")[1:]


class Command:
    """Calls `nemo-rl-reshard` with arguments; relative paths are under `folder`."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(folder)

    def __call__(self, *arguments: str | Path) -> Ended:
        self._monkeypatch.setattr(sys, "argv", ["nemo-rl-reshard", *map(str, arguments)])
        self._capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        caught = self._capsys.readouterr()
        return Ended(code, caught.out, caught.err)

    def write(self, name: str, text: str) -> Path:
        """Write a file into the folder."""
        path = self.folder / name
        path.write_text(text)
        return path
