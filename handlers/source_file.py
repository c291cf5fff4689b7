"""Reads what a Python file imports, defines and calls, without running it.

A parser takes hundreds of bytes and some microseconds for each byte of its input. So only a short file is parsed in this
process. A longer one is parsed by a child with limits of processor time and memory: this file, run as a script.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_SOURCE_BYTES = 1 << 20
MAX_OWN_BYTES = 16 << 10
"""A longer file is parsed in a child."""
MAX_NAME_CHARS, MAX_FACTS_CHARS = 200, 256 << 10
"""A longer name is left out. A file that is parsed in a child counts as not parsable if its facts have more characters as
JSON.
"""
CHILD_S, CHILD_BYTES, NICENESS = 10, 1 << 30, 10
"""The child's limits of processor time and of memory, and its niceness."""
WAIT_S = 30.0


class SourceClass(NamedTuple):
    """A top-level class."""

    name: str
    bases: tuple[str, ...]
    """The full dotted names of its base classes; "" for an expression without such a name."""
    methods: tuple[str, ...]


class SourceFile(NamedTuple):
    """The facts that one file shows without being run."""

    imported: dict[str, str]
    """Each imported name with its full dotted name."""
    packages: tuple[str, ...]
    """The top-level packages of all absolute imports."""
    arity: dict[str, int | None]
    """Each top-level name with its number of positional parameters; None if it is not a function, or takes any number."""
    classes: tuple[SourceClass, ...]
    calls: frozenset[str]
    """The full dotted names of everything that is called in the file."""

    @classmethod
    def read(cls, path: Path) -> SourceFile | None:
        """Return the facts that a file shows; None if it cannot be read or parsed. A later import of the file reports
        why. Blocks.
        """
        try:
            if path.stat().st_size > MAX_SOURCE_BYTES:
                return None
            source = path.read_bytes()
        except OSError:
            return None
        return _parse(source) if len(source) <= MAX_OWN_BYTES else _parse_in_child(source)

    def imports(self, package: str) -> bool:
        return any(name.partition(".")[0] == package for name in self.imported.values())


def _parse(source: bytes) -> SourceFile | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    nodes = list(ast.walk(tree))
    imported, packages = dict[str, str](), dict[str, None]()
    for node in nodes:
        _note_import(node, imported, packages)
    arity, classes = dict[str, int | None](), list[SourceClass]()
    for statement in _top_level(tree.body):
        _note_definition(statement, arity)
        if isinstance(statement, ast.ClassDef):
            bases = tuple(_full_name(base, imported) for base in statement.bases)
            classes.append(SourceClass(statement.name, bases, _methods(statement)))
    calls = frozenset(_full_name(node.func, imported) for node in nodes if isinstance(node, ast.Call)) - {""}
    return SourceFile(imported, tuple(packages), arity, tuple(classes), calls)


# Keep the latest results, because a deploy reads the same file several times.
@functools.lru_cache(maxsize=8)
def _parse_in_child(source: bytes) -> SourceFile | None:
    command = [sys.executable, "-I", "-S", __file__]
    try:
        # S603: the command has no part of a function.
        ran = subprocess.run(command, input=source, capture_output=True, timeout=WAIT_S, check=True)
        facts = json.loads(ran.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, RecursionError):
        return None
    if facts is None:
        return None
    imported, packages, arity, classes, calls = facts
    made = tuple(SourceClass(name, tuple(bases), tuple(methods)) for name, bases, methods in classes)
    return SourceFile(imported, tuple(packages), arity, made, frozenset(calls))


def _full_name(node: ast.expr, imported: dict[str, str]) -> str:
    """Return the full name of an expression: for `rp.serverless.start`, "runpod.serverless.start"; "" if it has no
    such name.
    """
    steps: list[str] = []
    while isinstance(node, ast.Attribute):
        steps.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    name = ".".join([imported.get(node.id, node.id), *reversed(steps)])
    # Limit the name: if a package has a long name, each short call of it becomes a long name.
    return name if len(name) <= MAX_NAME_CHARS else ""


def _note_import(node: ast.AST, names: dict[str, str], packages: dict[str, None]) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            packages[first] = None
            names[alias.asname or first] = alias.name if alias.asname else first
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        packages[node.module.partition(".")[0]] = None
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


def _methods(node: ast.ClassDef) -> tuple[str, ...]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple(inner.name for inner in node.body if isinstance(inner, functions))


def _note_definition(node: ast.stmt, arity: dict[str, int | None]) -> None:
    if isinstance(node, ast.ClassDef):
        arity[node.name] = None
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        count = len(node.args.posonlyargs) + len(node.args.args)
        arity[node.name] = None if node.args.vararg else count
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        arity.update({alias.asname or alias.name: None for alias in node.names})
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        arity.update({target.id: None for target in targets if isinstance(target, ast.Name)})


def _main() -> None:
    # Lower the priority of this process, so that calls of functions are served first.
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (CHILD_S, CHILD_S))
    resource.setrlimit(resource.RLIMIT_AS, (CHILD_BYTES, CHILD_BYTES))
    found = _parse(sys.stdin.buffer.read(MAX_SOURCE_BYTES))
    facts = json.dumps(None if found is None else [*found[:-1], sorted(found.calls)])
    sys.stdout.write(facts if len(facts) <= MAX_FACTS_CHARS else "null")


if __name__ == "__main__":
    _main()
