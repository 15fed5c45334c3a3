"""The pages about NeMo RL say what the code says: the section's keys and defaults, messages, files, the lines."""

from __future__ import annotations

import ast
import inspect
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from nemo_rl_reshard.integrations.nemo_rl import attach as door
from nemo_rl_reshard.integrations.nemo_rl.section import NemoRlSection

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "nemo-rl.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, flags=re.DOTALL)


def defaults(section: BaseModel) -> dict[str, Any]:
    """Plain values under the names that YAML gives them."""
    plain: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        plain[name] = defaults(value) if isinstance(value, BaseModel) else value
    return {name: str(value) if isinstance(value, StrEnum) else value for name, value in plain.items()}


def test_the_page_shows_every_key_with_its_default() -> None:
    (shown,) = [yaml.safe_load(text)["refit"] for language, text in BLOCKS if language == "yaml"]
    # YAML 1.1 reads a bare `off` as false; the section takes it as written.
    assert NemoRlSection.read(shown) == NemoRlSection()
    assert {**shown, "verify": "off"} == defaults(NemoRlSection())


def test_the_lines_shown_are_calls_that_attach_takes() -> None:
    calls = [
        node
        for language, text in BLOCKS
        if language == "python"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attach"
    ]
    assert len(calls) == 2
    for call in calls:
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        inspect.signature(door.attach).bind(*call.args, **keywords)
    assert list(inspect.signature(door.attach_single_controller).parameters) == ["actor_args", "config"]


def test_recipes_and_files_that_the_page_names_are_there() -> None:
    for recipe in re.findall(r"^\| `(grpo-[^`]+)` \|", PAGE, flags=re.MULTILINE):
        assert (ROOT / "configs" / "nemo_rl" / f"{recipe}.yaml").exists(), recipe
    assert (ROOT / "nemo_rl_reshard" / "integrations" / "nemo_rl" / "worker_classes.py").exists()
    for page in ("nemo-rl.md", "nccl-reshard.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "docs" / page).read_text()):
            assert (ROOT / "docs" / target).exists(), f"{page} -> {target}"


@pytest.mark.parametrize(
    "message",
    [
        "refit configuration",
        "NeMo RL as the plugin finds it",
        "its environment cannot import this package",
        "imports nemo_rl_reshard",
        "no rank reported a cause of its own",
        "engines were not idle before the refit",
        "engines took up requests during the refit",
        "the ranks' environments do not fit NCCL",
        "transport: nccl cannot be used",
        "the run asked for refit.backend",
    ],
)
def test_messages_in_the_troubleshooting_table_are_those_of_the_code(message: str) -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "nemo_rl_reshard").rglob("*.py")))
    assert message in PAGE
    assert message in source
