"""Commands on the pages are commands that work: each is run as written, on a tiny spec in place of the one it names."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from equipment.command import Command
from equipment.model_specs import EXPERTS, model_spec, write_spec

from nemo_rl_reshard.cli.spec import parse_spec

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/how-fast.md", "docs/reference.md")
BLOCKS = [
    (page, language, text)
    for page in PAGES
    for language, text in re.findall(r"```(\w*)\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
]
COMMANDS = sorted(
    {
        line
        for _, _, text in BLOCKS
        for line in text.splitlines()
        if re.match(r"nemo-rl-reshard (plan|simulate) .*\.yaml", line)
    }
)


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, capsys, monkeypatch)


def test_the_page_shows_commands() -> None:
    assert {line.split()[1] for line in COMMANDS} == {"plan", "simulate"}


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_pages_runs(command: Command, line: str) -> None:
    (spec,) = re.findall(r"\S+\.yaml", line)
    assert (ROOT / spec).exists(), spec
    tiny = write_spec(command.folder, model_spec(command.folder, EXPERTS))
    words = shlex.split(line.replace(spec, str(tiny)), comments=True)
    ended = command(*words[1:])
    assert (ended.code, ended.err) == (0, "")
    for option, value in pairwise(words):
        if option in ("--plot", "--json"):
            assert (command.folder / value).exists()


def test_the_specs_by_model_on_the_pages_can_be_read(tmp_path: Path) -> None:
    shown = [yaml.safe_load(text) for _, language, text in BLOCKS if language == "yaml" and "model:" in text]
    assert shown
    for plain in shown:
        # Laying out a whole cluster takes seconds; everything but the model is what the page says.
        small = {**plain, "model": model_spec(tmp_path)["model"], "source": {"backend": "fsdp2", "world": 4}}
        assert parse_spec({**small, "target": {"backend": "vllm", "world": 4, "tp": 2}}, folder=tmp_path).described


def test_links_and_pictures_of_the_page_are_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "docs" / "how-fast.md").read_text()):
        assert (ROOT / "docs" / target).exists(), target
