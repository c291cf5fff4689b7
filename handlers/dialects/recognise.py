"""Recognises the dialect of a folder's handler by reading the folder's files, without running them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...errors import HandlerSignatureError

DIALECTS = ("pilotflame", "runpod", "cog", "lambda")
DEFAULT = "handler.py"
# These files are read first, in this order. Then follow all other files in the folder, and those in `src`.
USUAL = ("rp_handler.py", "predict.py", "run.py", "lambda_function.py", "app.py", "index.py", "main.py")
# In files of these names, `handler(event, context)` is a Lambda handler. In others it is pilotflame's own.
LAMBDA_FILES = ("lambda_function.py", "app.py", "index.py")
LAMBDA_NAME = "lambda_handler"
COG_METHODS = {"Predictor": "predict", "Runner": "run"}
RUNPOD_START = "runpod.serverless.start"
MAX_SOURCE_BYTES = 1 << 20
MAX_SOURCES = 200
_COG_ENTRY = re.compile(r"""(?m)^(?:predict|run):\s*["']?([\w./-]+\.py)(?::(\w+))?["']?\s*(?:#.*)?$""")


class Entry(NamedTuple):
    """Where a handler is: its dialect, its file, and its name in the file. For RunPod the name may be ""."""

    dialect: str
    file: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.file}:{self.name}" if self.name else self.file


def parse(reference: str) -> Entry:
    """Return the parts of a reference such as "file.py:name" or "cog:predict.py:Predictor"; "" if missing."""
    first, colon, rest = reference.partition(":")
    dialect, rest = (first, rest) if colon and first in DIALECTS else ("", reference)
    file, _, name = rest.partition(":")
    return Entry(dialect, file, name)


def recognise(root: Path, reference: str = DEFAULT) -> Entry:
    """Return where the handler is that `reference` names in the folder `root`.

    If the reference names no dialect, the contents of its file decide. If it is the default reference, and
    handler.py shows no handler or does not exist, the other files of the folder are searched for foreign
    handlers. If none is found, the dialect is pilotflame's own. Raises HandlerSignatureError if several files
    have a foreign handler.
    """
    wanted = parse(reference)
    source = _read(root / wanted.file)
    if wanted.dialect:
        return wanted._replace(name=wanted.name or _default_name(wanted.dialect, source))
    found = _entry_in(wanted.file, wanted.name, source)
    # True if handler.py may define a handler that reading it does not show. Then no other file is searched:
    # importing handler.py finds the handler, or reports the fault.
    opaque = (root / DEFAULT).is_file() and (source is None or "*" in source.names)
    if found is None and reference == DEFAULT and not opaque:
        found = _cog_yaml(root) or _search(root)
    return found or Entry("pilotflame", wanted.file, wanted.name or "handler")


@dataclass(slots=True)
class _Source:
    """What reading one file shows.

    `names` maps each imported name to its full dotted name. `arity` maps each top-level name to its number of
    positional parameters, or to None if it is not a function or takes any number.
    """

    names: dict[str, str] = field(default_factory=dict)
    arity: dict[str, int | None] = field(default_factory=dict)
    classes: list[ast.ClassDef] = field(default_factory=list)
    starts_runpod: bool = False

    def imports(self, package: str) -> bool:
        return any(name.partition(".")[0] == package for name in self.names.values())

    @property
    def predictor(self) -> str:
        """The name of the class that Cog would use, or "" if there is none."""
        if not self.imports("cog"):
            return ""
        cog = ("cog.BasePredictor", "cog.BaseRunner")
        derived = [one.name for one in self.classes for base in one.bases if _dotted(base, self.names) in cog]
        named = [one.name for one in self.classes if COG_METHODS.get(one.name) in _methods(one)]
        usual = [name for name in ("Runner", "Predictor") if name in derived or name in named]
        return next(iter([*usual, *derived]), "")


def _entry_in(file: str, name: str, source: _Source | None) -> Entry | None:
    """Return the handler that `source`, the contents of `file`, shows, or None. `name` is its name or ""."""
    if source is None:
        return None
    if name:
        dialect = "lambda" if name == LAMBDA_NAME else "cog" if name == source.predictor else "pilotflame"
        return Entry(dialect, file, name)
    has_handler, is_ours = "handler" in source.arity, source.imports("pilotflame")
    if source.starts_runpod and not (has_handler and is_ours):
        return Entry("runpod", file, "")
    if has_handler:
        fits = LAMBDA_NAME in source.arity or source.arity["handler"] == 2
        dialect = "lambda" if fits and not is_ours and Path(file).name in LAMBDA_FILES else "pilotflame"
        return Entry(dialect, file, _default_name(dialect, source))
    if source.predictor:
        return Entry("cog", file, source.predictor)
    return Entry("lambda", file, LAMBDA_NAME) if LAMBDA_NAME in source.arity else None


def _default_name(dialect: str, source: _Source | None) -> str:
    if dialect == "cog":
        return (source.predictor if source else "") or "Predictor"
    if dialect == "lambda":
        return LAMBDA_NAME if source is None or LAMBDA_NAME in source.arity else "handler"
    return "" if dialect == "runpod" else "handler"


def _cog_yaml(root: Path) -> Entry | None:
    """Return the handler that cog.yaml names in a line such as `predict: "predict.py:Predictor"`, or None."""
    try:
        found = _COG_ENTRY.search((root / "cog.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeError):
        return None
    if found is None:
        return None
    file = found[1]
    if file.startswith("/") or ".." in file.split("/") or not (root / file).is_file():
        return None
    return Entry("cog", file, found[2] or _default_name("cog", _read(root / file)))


def _search(root: Path) -> Entry | None:
    usual = [name for name in USUAL if (root / name).is_file()]
    others = [name for name in _python_files(root, "") if name not in (*usual, DEFAULT)]
    for names in (usual, others, _python_files(root, "src/")):
        entries = (_entry_in(name, "", _read(root / name)) for name in names)
        found = [entry for entry in entries if entry is not None and entry.dialect != "pilotflame"]
        if len(found) > 1 and names is not usual:
            fault = f"Several files could be the handler: {', '.join(entry.file for entry in found)}."
            remedy = f'Name one in pilotflame.toml, as `handler = "{found[0].dialect}:{found[0].label}"`.'
            raise HandlerSignatureError(fault, remedy=remedy)
        if found:
            return found[0]
    return None


def _python_files(root: Path, folder: str) -> list[str]:
    found = sorted(path.name for path in (root / folder).glob("*.py"))
    return [folder + name for name in found[:MAX_SOURCES]]


def _read(path: Path) -> _Source | None:
    """Return what reading a file shows, or None if it cannot be read or parsed: importing it reports why."""
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return None
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    source = _Source()
    for node in ast.walk(tree):
        _note_import(node, source.names)
    for node in _top_level(tree.body):
        _note_definition(node, source)
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    source.starts_runpod = any(_dotted(call, source.names) == RUNPOD_START for call in calls)
    return source


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


def _note_definition(node: ast.stmt, source: _Source) -> None:
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


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """Return the full name of an expression: for `rp.serverless.start`, "runpod.serverless.start"; or ""."""
    steps: list[str] = []
    while isinstance(node, ast.Attribute):
        steps.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(steps)])


def _methods(node: ast.ClassDef) -> set[str]:
    return {inner.name for inner in node.body if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))}
