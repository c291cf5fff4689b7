"""Reads what a Python file imports, defines and calls, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_SOURCE_BYTES = 1 << 20


@dataclass(slots=True)
class SourceFile:
    """The facts that one file shows without being run."""

    imported: dict[str, str] = field(default_factory=dict)
    """Each imported name with its full dotted name."""
    arity: dict[str, int | None] = field(default_factory=dict)
    """Each top-level name with its number of positional parameters; None if it is not a function, or takes any number."""
    classes: list[ast.ClassDef] = field(default_factory=list)
    calls: frozenset[str] = frozenset()
    """The full dotted names of everything that is called in the file."""

    @classmethod
    def read(cls, path: Path) -> SourceFile | None:
        """Return the facts that a file shows; None if it cannot be read or parsed. A later import of the file reports
        why.
        """
        try:
            if path.stat().st_size > MAX_SOURCE_BYTES:
                return None
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        source = cls()
        nodes = list(ast.walk(tree))
        for node in nodes:
            _note_import(node, source.imported)
        for statement in _top_level(tree.body):
            _note_definition(statement, source)
        calls = (source.full_name(node.func) for node in nodes if isinstance(node, ast.Call))
        source.calls = frozenset(calls) - {""}
        return source

    def imports(self, package: str) -> bool:
        return any(name.partition(".")[0] == package for name in self.imported.values())

    def full_name(self, node: ast.expr) -> str:
        """Return the full name of an expression: for `rp.serverless.start`, "runpod.serverless.start"; "" if it has no
        such name.
        """
        steps: list[str] = []
        while isinstance(node, ast.Attribute):
            steps.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        return ".".join([self.imported.get(node.id, node.id), *reversed(steps)])


def _note_import(node: ast.AST, names: dict[str, str]) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            names[alias.asname or first] = alias.name if alias.asname else first
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the module's top-level statements, including those inside `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, part, ()))
        for caught in getattr(node, "handlers", ()):
            yield from _top_level(caught.body)


def _note_definition(node: ast.stmt, source: SourceFile) -> None:
    if isinstance(node, ast.ClassDef):
        source.classes.append(node)
        source.arity[node.name] = None
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        count = len(node.args.posonlyargs) + len(node.args.args)
        source.arity[node.name] = None if node.args.vararg else count
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        source.arity.update({alias.asname or alias.name: None for alias in node.names})
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        source.arity.update({target.id: None for target in targets if isinstance(target, ast.Name)})
