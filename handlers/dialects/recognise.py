"""Recognising: whose contract a folder's handler keeps, read from its files without running any of them."""

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
# Looked at first, in this order; then all others of the folder, and of `src`.
USUAL = ("rp_handler.py", "predict.py", "run.py", "lambda_function.py", "app.py", "index.py", "main.py")
# Where `handler(event, context)` means Lambda's; elsewhere it may as well be pilotflame's.
LAMBDA_FILES = ("lambda_function.py", "app.py", "index.py")
LAMBDA_NAME = "lambda_handler"
COG_METHODS = {"Predictor": "predict", "Runner": "run"}
RUNPOD_START = "runpod.serverless.start"
MAX_SOURCE_BYTES = 1 << 20
MAX_SOURCES = 200
_COG_ENTRY = re.compile(
    r"""^(?:predict|run):\s*["']?([\w./-]+\.py)(?::(\w+))?["']?\s*(?:#.*)?$""", re.MULTILINE
)


class Entry(NamedTuple):
    """Where a handler is: its file, its name there ("" where the dialect needs none), and whose contract it keeps."""

    dialect: str
    file: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.file}:{self.name}" if self.name else self.file


def parse(reference: str) -> Entry:
    """What a reference says: "file.py", "file.py:name", "runpod:file.py", "cog:predict.py:Predictor"."""
    first, colon, rest = reference.partition(":")
    dialect, rest = (first, rest) if colon and first in DIALECTS else ("", reference)
    file, _, name = rest.partition(":")
    return Entry(dialect, file, name)


def recognise(root: Path, reference: str = DEFAULT) -> Entry:
    """Which handler `reference` means in the folder `root`; a dialect that it names is taken as said.

    Without one the file itself tells, and of a folder without handler.py the others do. Pilotflame's own handler
    comes first wherever it is one; what cannot be told is taken for pilotflame's, whose errors say what is missing.
    Raises HandlerSignatureError if several files could be meant.
    """
    asked = parse(reference)
    source = _read(root / asked.file)
    if asked.dialect:
        return asked._replace(name=asked.name or _default_name(asked.dialect, source))
    found = _told_by(asked.file, asked.name, source)
    if found is None and reference == DEFAULT and not _opaque(root / DEFAULT, source):
        found = _cog_yaml(root) or _search(root)
    return found or Entry("pilotflame", asked.file, asked.name or "handler")


def _opaque(path: Path, source: _Source | None) -> bool:
    """Whether a file is there that may hold a handler although none is seen: then its own import is to say what is."""
    return path.is_file() and (source is None or "*" in source.names)


@dataclass(slots=True)
class _Source:
    """What a file says about itself."""

    names: dict[str, str] = field(default_factory=dict)  # what was imported, by the name it has here
    arity: dict[str, int | None] = field(
        default_factory=dict
    )  # top-level names; None: no function, or any number
    classes: list[ast.ClassDef] = field(default_factory=list)
    starts_runpod: bool = False

    def imports(self, package: str) -> bool:
        return any(name.partition(".")[0] == package for name in self.names.values())

    @property
    def lambda_name(self) -> str:
        """The function that Lambda would call in a file of its own, or ""."""
        if LAMBDA_NAME in self.arity:
            return LAMBDA_NAME
        return "handler" if self.arity.get("handler") == 2 else ""

    @property
    def predictor(self) -> str:
        """The class that Cog would take, or ""."""
        if not self.imports("cog"):
            return ""
        bases = ("cog.BasePredictor", "cog.BaseRunner")
        derived = [
            one.name for one in self.classes if any(_dotted(base, self.names) in bases for base in one.bases)
        ]
        named = [one.name for one in self.classes if COG_METHODS.get(one.name) in _methods(one)]
        usual = [name for name in ("Runner", "Predictor") if name in derived or name in named]
        return next(iter([*usual, *derived]), "")


def _told_by(file: str, name: str, source: _Source | None) -> Entry | None:
    """Whose handler this file holds, by what stands in it; None if by that it holds none."""
    if source is None:
        return None
    if name:
        dialect = "lambda" if name == LAMBDA_NAME else "cog" if name == source.predictor else "pilotflame"
        return Entry(dialect, file, name)
    owned = "handler" in source.arity
    if source.starts_runpod and not (owned and source.imports("pilotflame")):
        return Entry("runpod", file, "")
    if owned:
        theirs = Path(file).name in LAMBDA_FILES and not source.imports("pilotflame") and source.lambda_name
        return Entry("lambda", file, theirs) if theirs else Entry("pilotflame", file, "handler")
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
    """What `predict: "predict.py:Predictor"` in cog.yaml names, if that file is there."""
    try:
        found = _COG_ENTRY.search((root / "cog.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeError):
        return None
    if (
        found is None
        or found[1].startswith("/")
        or ".." in found[1].split("/")
        or not (root / found[1]).is_file()
    ):
        return None
    return Entry("cog", found[1], found[2] or _default_name("cog", _read(root / found[1])))


def _search(root: Path) -> Entry | None:
    usual = [name for name in USUAL if (root / name).is_file()]
    others = [name for name in _files(root, "") if name not in (*usual, DEFAULT)]
    for names in (usual, others, list(_files(root, "src/"))):
        found = [entry for name in names if (entry := _foreign(root, name)) is not None]
        if len(found) > 1 and names is not usual:
            raise HandlerSignatureError(
                f"Several files could be the handler: {', '.join(entry.file for entry in found)}.",
                remedy=f'Say which in pilotflame.toml, as `handler = "{found[0].dialect}:{found[0].label}"`.',
            )
        if found:
            return found[0]
    return None


def _foreign(root: Path, name: str) -> Entry | None:
    entry = _told_by(name, "", _read(root / name))
    return entry if entry is not None and entry.dialect != "pilotflame" else None


def _files(root: Path, folder: str) -> Iterator[str]:
    """The Python files of one folder, by their paths below `root`."""
    try:
        found = sorted(path.name for path in (root / folder).iterdir() if path.suffix == ".py")
    except OSError:
        return
    yield from (folder + name for name in found[:MAX_SOURCES])


# -- reading one file


def _read(path: Path) -> _Source | None:
    """None where nothing can be seen: no such file, or no Python (its import says why)."""
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
    source.starts_runpod = any(
        isinstance(node, ast.Call) and _dotted(node.func, source.names) == RUNPOD_START
        for node in ast.walk(tree)
    )
    return source


def _note_import(node: ast.AST, names: dict[str, str]) -> None:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.asname:
                names[alias.asname] = alias.name
            else:
                first = alias.name.partition(".")[0]
                names[first] = first
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})


def _top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that make names of the module, also those in `if`, `try` and `with`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _top_level(getattr(node, part, ()))
        if isinstance(node, ast.Try):
            for caught in node.handlers:
                yield from _top_level(caught.body)


def _note_definition(node: ast.stmt, source: _Source) -> None:
    if isinstance(node, ast.ClassDef):
        source.classes.append(node)
        source.arity[node.name] = None
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = node.args
        source.arity[node.name] = None if given.vararg else len(given.posonlyargs) + len(given.args)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        source.arity.update({alias.asname or alias.name: None for alias in node.names})
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        source.arity.update({target.id: None for target in targets if isinstance(target, ast.Name)})


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`rp.serverless.start` as "runpod.serverless.start", where rp is what runpod was imported as; "" if it is no name."""
    steps: list[str] = []
    while isinstance(node, ast.Attribute):
        steps.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(steps)])


def _methods(node: ast.ClassDef) -> set[str]:
    return {inner.name for inner in node.body if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef))}
