"""Which names a Python package defines, read from its source: importing it may need much more than is here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


class SourceNames:
    """The names below one package folder. Modules are dotted names that start with the package's own."""

    def __init__(self, folder: Path) -> None:
        self._root, self._package = folder.parent, folder.name
        self._trees: dict[str, ast.Module | None] = {}

    def defines(self, module: str, name: str) -> bool:
        """Whether `module` binds `name`: `function`, `Class`, or `Class.member`.

        A member is a method, an attribute of the class or one that a method sets on `self`; base classes count as far
        as they are in the package.
        """
        owner, _, member = name.partition(".")
        home = self._home(module, owner)
        if home is None or not member:
            return home is not None
        return member in self._members(*home)

    def _home(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """The module and the statement that make `name`, imports inside the package followed."""
        tree = self._tree(module)
        for statement in _statements(tree) if tree is not None else ():
            if name not in _bound(statement):
                continue
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                imported = next(alias.name for alias in statement.names if name in (alias.asname, alias.name))
                if statement.module.partition(".")[0] == self._package:
                    return self._home(statement.module, imported)
            return module, statement
        return None

    def _members(self, module: str, statement: ast.AST) -> set[str]:
        if not isinstance(statement, ast.ClassDef):
            return set()
        found = {name for inner in _statements(statement) for name in _bound(inner)}
        found |= {
            node.attr
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        for base in statement.bases:
            home = self._home(module, base.id) if isinstance(base, ast.Name) else None
            if home is not None:
                found |= self._members(*home)
        return found

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            place = self._root.joinpath(*module.split("."))
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            try:
                self._trees[module] = ast.parse(file.read_text(encoding="utf-8"))
            except (OSError, SyntaxError):
                self._trees[module] = None
        return self._trees[module]


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module or class, those under `if`, `try` and `with` included, not those inside functions."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(child)


def _bound(statement: ast.AST) -> set[str]:
    """Names that one statement binds in its scope."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
