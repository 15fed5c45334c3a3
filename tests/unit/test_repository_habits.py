"""The habits that keep the package readable, checked rather than remembered."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nemo_rl_reshard"
SOURCES = sorted(
    path for folder in ("nemo_rl_reshard", "examples", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")
)
VAGUE_WORDS = {"utils", "util", "helper", "helpers", "manager", "misc", "common", "info"}
# What stands in for a foreign package has to carry the names of its modules.
FOREIGN_NAMES = ROOT / "tests" / "nemo_rl" / "stand_ins" / "site"


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_file_holds_one_idea_and_says_which() -> None:
    long = [_name(path) for path in SOURCES if len(path.read_text().splitlines()) > 400]
    silent = [_name(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not long, "split by idea"
    assert not silent, "the first line says what the file is for"


def test_file_names_are_nouns_of_the_field() -> None:
    vague = [
        _name(path)
        for path in SOURCES
        if FOREIGN_NAMES not in path.parents
        and VAGUE_WORDS & {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")}
    ]
    assert not vague


def test_the_core_and_the_workers_import_neither_ray_nor_the_drivers_libraries() -> None:
    modules = [
        "nemo_rl_reshard." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for layer in ("layout", "params", "topology", "plan", "transport", "sources", "runtime")
        for path in sorted((PACKAGE / layer).glob("*.py"))
        if path.stem != "__init__"
    ]
    program = (
        f"import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"found = {{'ray', 'pydantic', 'typer', 'rich', 'matplotlib', 'omegaconf', 'vllm', 'transformers'}}\n"
        f"sys.exit(', '.join(sorted(found & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_pure_core_imports_no_torch() -> None:
    modules = [
        "nemo_rl_reshard." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for layer in ("layout", "params", "topology", "plan")
        for path in sorted((PACKAGE / layer).glob("*.py"))
        if path.stem != "__init__"
    ]
    program = (
        f"import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"sys.exit('torch' in sys.modules and 'torch was imported' or None)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
