"""The table of known refit faults: complete, and every test it names exists and says which kind it is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS.parent / "docs" / "bug-kinds.md"
OWED = {
    f"B{number:02d}"
    for first, last in (
        (1, 7), (9, 27), (30, 58), (60, 78),
    )
    for number in range(first, last + 1)
}  # fmt: skip


def _rows() -> dict[str, list[str]]:
    rows = re.findall(r"^\| (B\d\d) \| .+? \| (.+) \|$", TABLE.read_text(), flags=re.MULTILINE)
    return {kind: re.findall(r"`([^`]+)`", tests) for kind, tests in rows}


def test_every_kind_has_a_row_with_tests() -> None:
    rows = _rows()
    assert rows.keys() == OWED
    assert all(rows.values())


def test_every_named_test_exists_and_names_its_kind() -> None:
    faults = []
    for kind, tests in _rows().items():
        for test in tests:
            path, _, name = test.partition("::")
            functions = {
                node.name: node
                for node in ast.walk(ast.parse((TESTS / path).read_text()))
                if isinstance(node, ast.FunctionDef)
            }
            if name not in functions:
                faults.append(f"{test} does not exist")
                continue
            node = functions[name]
            said = f"{name} {ast.get_docstring(node)} {' '.join(map(ast.unparse, node.decorator_list))}"
            if not re.search(rf"{kind}(?!\d)", said, flags=re.IGNORECASE):
                faults.append(f"{test} does not say that it is for {kind}")
    assert not faults
