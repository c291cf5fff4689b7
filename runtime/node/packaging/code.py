"""Selects the files of a function's folder that are its code, and packs, copies and digests them.

Only `select` decides which files belong to a function, so the packed, copied and digested files are the same. Links to
files and folders inside the function's folder are followed: a revision contains copies of their targets. Empty folders
and file times are not part of the code.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from ....errors import CodeError

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

MAX_CODE_BYTES = 256 * 1024 * 1024
MAX_FILES = 20_000
IGNORE_FILE = ".pilotflameignore"
KEPT_FILE = ".pilotflame-kept.json"
"""The file of an upload that lists the files which the gateway takes from the live revision."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# Patterns, in the syntax of .gitignore, of files that are left out unless the ignore file includes them, with a line
# such as `!.env`. In such a list, later patterns win. The patterns of the ignore file are appended to this list.
_NOT_CODE = (
    ".git", ".hg/", ".svn/", ".jj/", "__pycache__/", ".venv/", "node_modules/", ".idea/", ".vscode/",
    ".ipynb_checkpoints/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".hypothesis/", ".tox/", ".nox/",
    ".cache/", ".direnv/", ".eggs/", "*.egg-info/", "htmlcov/", ".coverage", ".terraform/",
    "*.py[co]", "*.sw[po]", "*~", ".#*", "\\#*#", ".DS_Store", "._*",
)  # fmt: skip
# Patterns of files that hold credentials. `withheld` returns the files that match, because code may need them.
_CREDENTIALS = (
    ".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx",
    "*.jks", "*.kdbx", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".ssh/", ".aws/", ".azure/", ".gcloud/",
    ".kube/", ".docker/", ".gnupg/", ".netrc", "_netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd",
    "*.tfstate", "*.tfstate.*", ".bash_history", ".python_history",
)  # fmt: skip
_WEIGHTS_REMEDY = f"Put weights in a snapshot folder (`snapshot = ...`), or list other data in {IGNORE_FILE}."


class CodeFile(NamedTuple):
    """One file of a function. `name` is its path in the function's folder, `path` its real path."""

    name: str
    path: Path
    size: int
    mode: int
    """0o755 if its owner may execute it, else 0o644."""


class FileDigest(TypedDict):
    """The path of a file of the code, the SHA-256 of its content in hex, and whether it may be executed."""

    path: str
    sha256: str
    executable: bool


def select(folder: Path, *, exclude: Collection[Path] = ()) -> list[CodeFile]:
    """Return the files in `folder` that are a function's code, sorted by name.

    `exclude` are the paths of the function's snapshots. They are left out with everything inside them. Raise CodeError
    if the files are too many or too big, or if a file cannot be used.
    """
    root = Path(os.path.realpath(folder))
    if not root.is_dir():
        raise CodeError(f"{folder} is not a folder.", remedy="Give the folder that holds handler.py.")
    excluded = {Path(os.path.realpath(root / path)) for path in exclude}
    # Do not leave out a snapshot that is the function's folder itself. Otherwise no file would remain.
    walk = _Walk(root, _ignored(root), frozenset(excluded - {root}))
    return _selected(folder, walk)


def withheld(folder: Path) -> list[str]:
    """Return the names of files and folders that are left out because they look like credentials."""
    root = Path(os.path.realpath(folder))
    walk = _Walk(root, _ignored(root), frozenset())
    with contextlib.suppress(CodeError):
        _selected(folder, walk)
    return walk.withheld


def remove_ignored(folder: Path) -> None:
    """Remove from an unpacked archive the files that `select` leaves out, and the links to them.

    Skip hostile lines of the archive's ignore file. The program that packed the archive should have applied them
    before.
    """
    ignored = _ignored(folder, simple=True)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if not path.is_symlink() and ignored.match_file(f"{name}/" if path.is_dir() else name):
            shutil.rmtree(path) if is_folder else path.unlink(missing_ok=True)
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink()


def _selected(folder: Path, walk: _Walk) -> list[CodeFile]:
    files: list[CodeFile] = []
    # Folders count too: links between folders without files could make the walk practically endless.
    for count, file in enumerate(walk.entries(walk.root, "", (walk.root,)), 1):
        if count > MAX_FILES:
            raise CodeError(f"{folder} has over {MAX_FILES} files and folders.", remedy=_WEIGHTS_REMEDY)
        if file is not None:
            files.append(file)
    if (total := sum(file.size for file in files)) > MAX_CODE_BYTES:
        biggest = sorted(files, key=lambda file: -file.size)[:5]
        listed = ", ".join(f"{file.name} ({file.size / 2**20:.1f} MiB)" for file in biggest)
        size = f"{total / 2**20:.1f} MiB of code, more than {MAX_CODE_BYTES / 2**20:.0f} MiB"
        raise CodeError(f"{folder} holds {size}; biggest: {listed}.", remedy=_WEIGHTS_REMEDY)
    return sorted(files, key=lambda file: file.name.encode())


def pack(folder: Path, *, kept: Sequence[FileDigest] = ()) -> bytes:
    """Return the code in the function's folder as a tar.gz. The same code always gives the same bytes.

    The `kept` files are left out. A file named KEPT_FILE lists them: the gateway takes them from the live revision.
    """
    left_out = {file["path"] for file in kept}
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=packed, mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for file in select(folder):
            if file.name not in left_out:
                with _opened(file) as content:
                    _add(tar, file.name, content.read(), file.mode)
        if kept:
            _add(tar, KEPT_FILE, json.dumps({"files": kept}).encode(), 0o644)
    return packed.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), mode
    tar.addfile(member, io.BytesIO(data))


def copy_folder(source: Path, target: Path, *, exclude: Collection[Path] = ()) -> None:
    """Copy the code in the function's folder `source` into `target`, which must be empty or not exist."""
    files = select(source, exclude=exclude)
    make_empty(target)
    for file in files:
        path = target / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(file.path, path)
        except OSError as error:
            message = f"{file.name} cannot be copied: {error}."
            raise CodeError(message, remedy="Check its permissions and the disk.") from error
        path.chmod(file.mode)


def code_digest(folder: Path, *, exclude: Collection[Path] = ()) -> str:
    """Return a SHA-256, in hex, of the path, executable bit and content of every file of the code."""
    digest = hashlib.sha256()
    for file in file_digests(folder, exclude=exclude):
        flag, name = "x" if file["executable"] else "-", file["path"]
        digest.update(f"{file['sha256']} {flag} {len(name.encode())} {name}\n".encode())
    return digest.hexdigest()


def file_digests(folder: Path, *, exclude: Collection[Path] = ()) -> Iterator[FileDigest]:
    """Yield the digest of each file of the code, sorted by path."""
    for file in select(folder, exclude=exclude):
        with _opened(file) as opened:
            content = hashlib.file_digest(opened, "sha256").hexdigest()
        yield {"path": file.name, "sha256": content, "executable": file.mode == 0o755}


def identity(folder: Path) -> str:
    """Return a text that identifies a folder. It is the same in every process and container of this machine.

    It differs on another machine, because it contains the id of the machine's boot. Return "" if there is no such
    folder.
    """
    try:
        facts, boot = folder.stat(), _BOOT_ID.read_bytes()
    except OSError:
        return ""
    return hashlib.sha256(b"%s %d %d" % (boot, facts.st_dev, facts.st_ino)).hexdigest()


def make_empty(folder: Path) -> None:
    """Create the folder if it does not exist. Raise CodeError if it exists and is not empty."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise CodeError(f"{folder} is not empty.", remedy="Choose a new or empty folder.")


def _opened(file: CodeFile) -> io.BufferedReader:
    try:
        return file.path.open("rb")
    except OSError as error:
        raise _unreadable(file.name, error) from error


def _unreadable(name: object, error: OSError) -> CodeError:
    return CodeError(f"{name} cannot be read: {error.strerror}.", remedy="Make it readable, or remove it.")


@dataclass(frozen=True, slots=True)
class _Walk:
    """Walks over a function's folder. It follows links, skips entries that are not code, and checks every other entry.

    `root` is the folder's real path, and `excluded` the real paths of the snapshots.
    """

    root: Path
    ignored: GitIgnoreSpec
    excluded: frozenset[Path]
    withheld: list[str] = field(default_factory=list)
    """The names of the entries that are skipped because they match a pattern in `_CREDENTIALS`."""

    def entries(self, folder: Path, prefix: str, above: tuple[Path, ...]) -> Iterator[CodeFile | None]:
        """Yield each file in `folder` and its subfolders, and None for each subfolder.

        The names of the files begin with `prefix`. `above` are the real paths of the folders from the root down to
        `folder`, which is the last. A link to one of these folders would make the walk endless.
        """
        try:
            found = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise _unreadable(folder, error) from error
        for entry in found:
            name = prefix + entry.name
            utf8(name)
            real = Path(os.path.realpath(entry.path))
            if self._skips(entry, name, real):
                continue
            if entry.is_symlink():
                self._check_link(name, real, above)
            facts = real.stat()
            if stat.S_ISDIR(facts.st_mode):
                yield None
                yield from self.entries(real, f"{name}/", (*above, real))
            elif stat.S_ISREG(facts.st_mode):
                yield CodeFile(name, real, facts.st_size, 0o755 if facts.st_mode & stat.S_IXUSR else 0o644)
            else:
                remedy = f"List it in {IGNORE_FILE}."
                raise CodeError(f"{name} is neither a file nor a folder.", remedy=remedy)

    def _skips(self, entry: os.DirEntry[str], name: str, real: Path) -> bool:
        found = self.ignored.check_file(f"{name}/" if entry.is_dir() else name)
        if found.include:
            if found.index is not None and found.index < len(_CREDENTIALS):
                self.withheld.append(name)
            return True
        # A virtual environment is left out under any name, unless the ignore file includes it.
        if found.include is None and entry.is_dir() and Path(entry.path, "pyvenv.cfg").is_file():
            return True
        return any(real.is_relative_to(path) for path in self.excluded)

    def _check_link(self, name: str, real: Path, above: tuple[Path, ...]) -> None:
        if not real.is_relative_to(self.root):
            problem = f"that leaves the folder, to {real}"
        elif not real.exists():
            problem = "to nothing"
        elif real in above:
            problem = "to a folder that holds it"
        else:
            return
        remedy = f"Remove it, copy its target into the folder, or list it in {IGNORE_FILE}."
        raise CodeError(f"{name} is a link {problem}.", remedy=remedy)


# The limits of an ignore file in an upload.
MAX_LINES, MAX_CHARS, MAX_STARS = 1000, 256, 2
_STARS = re.compile(r"\*+")


def _ignored(root: Path, *, simple: bool = False) -> GitIgnoreSpec:
    """Return the patterns of the files that are left out: the built-in patterns, and the patterns of the ignore file in `root`.

    If `simple`, skip long lines and lines with many stars. To match a file name of n characters with a line of k stars
    takes up to n**k steps.
    """
    # Imported here because the import takes at least 10 ms, and only deploys need it.
    from pathspec import GitIgnoreSpec  # noqa: PLC0415

    file = root / IGNORE_FILE
    try:
        with file.open(encoding="utf-8") if file.exists() else io.StringIO() as text:
            lines = text.read(MAX_LINES * MAX_CHARS if simple else None).splitlines()
        if simple:
            lines = [
                line
                for line in lines[:MAX_LINES]
                if len(line) <= MAX_CHARS and len(_STARS.findall(line)) <= MAX_STARS
            ]
        return GitIgnoreSpec.from_lines([*_CREDENTIALS, *_NOT_CODE, *lines])
    except (OSError, ValueError) as error:
        raise CodeError(f"{file} cannot be read: {error}.", remedy="Write it like a .gitignore.") from error


def utf8(name: str) -> bytes:
    """Return `name` as UTF-8. Raise CodeError if the name is not valid UTF-8 on the disk."""
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise CodeError(f"The name {name!r} is not UTF-8.", remedy="Rename the file.") from error
