"""The code of a revision: a function's folder selected, packed, copied and digested.

One rule says what belongs to a function (`select`), so that a packed, a copied and a digested folder are the
same. Links to files and folders inside are followed; what they point at is what the revision keeps. Empty
folders and file times are not code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ...errors import CodeError

MAX_CODE_BYTES = 256 * 1024 * 1024
MAX_FILES = 20_000
IGNORE_FILE = ".pilotflameignore"

_SKIPPED_FOLDERS = (
    ".git", ".hg", ".svn", "__pycache__", ".venv", "node_modules", ".idea", ".vscode", ".ipynb_checkpoints",
    ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis",
)  # fmt: skip
_SKIPPED_FILES = ("*.pyc", "*.pyo", "*.swp", "*.swo", "*~", ".#*", "#*#", ".DS_Store", "._*", ".git")
_WEIGHTS_REMEDY = (
    f"Put weights in a snapshot folder (`snapshot = ...`), or name what is not code in {IGNORE_FILE}."
)


class CodeFile(NamedTuple):
    """One file of a function, by its path inside the folder."""

    name: str
    path: Path
    size: int
    executable: bool


class _Rule(NamedTuple):
    """One line of the ignore file."""

    pattern: str
    anchored: bool
    only_folders: bool
    negated: bool

    def matches(self, name: str, *, is_folder: bool) -> bool:
        if self.only_folders and not is_folder:
            return False
        return fnmatchcase(name if self.anchored else name.rpartition("/")[2], self.pattern)


def select(folder: Path, *, exclude: Path | None = None) -> list[CodeFile]:
    """The files that are a function's code, sorted by name; `exclude` (its snapshot) is left out."""
    root = Path(os.path.realpath(folder))
    if not root.is_dir():
        raise CodeError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")
    outside = Path(os.path.realpath(root / exclude)) if exclude is not None else None
    if outside == root:  # a snapshot that is the folder itself cannot be left out of it
        outside = None
    files: list[CodeFile] = []
    # Folders count too: links to folders of links could make the walk endless without a single file.
    for count, file in enumerate(_walk(root, "", _rules(root), outside, (root,)), 1):
        if count > MAX_FILES:
            raise CodeError(
                f"{folder} holds more than {MAX_FILES} files and folders.", remedy=_WEIGHTS_REMEDY
            )
        if file is not None:
            files.append(file)
    _check_size(folder, files)
    return sorted(files, key=lambda file: file.name.encode())


def pack(folder: Path, *, exclude: Path | None = None) -> bytes:
    """The function's folder as a tar.gz; the same bytes for the same code."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in select(folder, exclude=exclude):
            content = _content(file)
            member = tarfile.TarInfo(file.name)
            member.size = len(content)
            member.mode = 0o755 if file.executable else 0o644
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def copy_folder(source: Path, target: Path, *, exclude: Path | None = None) -> None:
    """Copy a function's code into `target`, a new folder: later edits of `source` change no revision."""
    files = select(source, exclude=exclude)
    _make_empty(target)
    for file in files:
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(file.path, path)
        except OSError as error:
            raise CodeError(
                f"{file.name} cannot be copied: {error}.", remedy="Look at its rights and the disk."
            ) from error
        path.chmod(0o755 if file.executable else 0o644)


def code_digest(folder: Path, *, exclude: Path | None = None) -> str:
    """Hex SHA-256 over every file's path, executable bit and content."""
    digest = hashlib.sha256()
    for file in select(folder, exclude=exclude):
        with _reading(file) as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(
            f"{content} {'x' if file.executable else '-'} {len(file.name.encode())} {file.name}\n".encode()
        )
    return digest.hexdigest()


def _make_empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CodeError(f"{folder} is not empty.", remedy="Code is only put into a new folder.")


def _content(file: CodeFile) -> bytes:
    with _reading(file) as opened:
        return opened.read()


def _reading(file: CodeFile) -> io.BufferedReader:
    try:
        return file.path.open("rb")
    except OSError as error:
        raise CodeError(
            f"{file.name} cannot be read: {error.strerror}.", remedy="Make it readable, or remove it."
        ) from error


# Selecting


def _walk(
    folder: Path, prefix: str, rules: list[_Rule], outside: Path | None, above: tuple[Path, ...]
) -> Iterator[CodeFile | None]:
    """The files below `folder`, None for each folder; `above` are the real ones on the way, root first."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise CodeError(
            f"{folder} cannot be read: {error.strerror}.", remedy="Make it readable, or remove it."
        ) from error
    for entry in entries:
        name = prefix + entry.name
        _check_name(name)
        if _skipped(entry, name, rules):
            continue
        real = Path(os.path.realpath(entry.path))
        if outside is not None and (real == outside or outside in real.parents):
            continue
        if entry.is_symlink():
            _check_link(name, real, above)
        if real.is_dir():
            yield None
            yield from _walk(real, f"{name}/", rules, outside, (*above, real))
        else:
            yield _file(name, real)


def _file(name: str, path: Path) -> CodeFile:
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise CodeError(
            f"{name} is neither a file nor a folder.", remedy=f"Remove it, or name it in {IGNORE_FILE}."
        )
    return CodeFile(name, path, facts.st_size, bool(facts.st_mode & stat.S_IXUSR))


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CodeError(f"The name {name!r} is not UTF-8.", remedy="Rename the file.") from error


def _check_link(name: str, real: Path, above: tuple[Path, ...]) -> None:
    root = above[0]
    if real != root and root not in real.parents:
        raise CodeError(
            f"{name} is a link that leaves the folder, to {real}.",
            remedy=f"Copy what it points at into the folder, or name it in {IGNORE_FILE}.",
        )
    if not real.exists():
        raise CodeError(f"{name} is a link to nothing.", remedy="Remove it.")
    if real in above:
        raise CodeError(f"{name} is a link to a folder that holds it.", remedy="Remove it.")


def _skipped(entry: os.DirEntry[str], name: str, rules: list[_Rule]) -> bool:
    is_folder = entry.is_dir()
    if is_folder and (entry.name in _SKIPPED_FOLDERS or Path(entry.path, "pyvenv.cfg").is_file()):
        return True
    if not is_folder and any(fnmatchcase(entry.name, pattern) for pattern in _SKIPPED_FILES):
        return True
    skipped = False
    for rule in rules:  # as in a .gitignore, the last line that matches decides
        if rule.matches(name, is_folder=is_folder):
            skipped = not rule.negated
    return skipped


def _rules(root: Path) -> list[_Rule]:
    try:
        lines = (root / IGNORE_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CodeError(
            f"{root / IGNORE_FILE} cannot be read: {error}.", remedy="Make it a text file."
        ) from error
    return [_rule(line.strip()) for line in lines if line.strip() and not line.startswith("#")]


def _rule(line: str) -> _Rule:
    negated, line = line.startswith("!"), line.removeprefix("!")
    only_folders, line = line.endswith("/"), line.rstrip("/")
    deep, line = line.startswith("**/"), line.removeprefix("**/")
    return _Rule(line.lstrip("/"), "/" in line and not (deep and "/" not in line), only_folders, negated)


def _check_size(folder: Path, files: list[CodeFile]) -> None:
    total = sum(file.size for file in files)
    if total > MAX_CODE_BYTES:
        biggest = sorted(files, key=lambda file: -file.size)[:5]
        named = ", ".join(f"{file.name} ({file.size / 2**20:.1f} MiB)" for file in biggest)
        raise CodeError(
            f"{folder} holds {total / 2**20:.1f} MiB of code, more than {MAX_CODE_BYTES / 2**20:.0f} MiB; "
            f"biggest: {named}.",
            remedy=_WEIGHTS_REMEDY,
        )
