"""Gives each process of a function a working directory and a TMPDIR of its own, so that workers share no files.

    ROOT/PID/work    the working directory, with the function's code in it
    ROOT/PID/tmp     TMPDIR
    ROOT/caches      caches of libraries that would use TMPDIR; the function's processes share them

A zygote's working directory contains the code. A worker's working directory contains what the zygote's contains after the
import. Small files and folders are copied, larger ones are links. `__file__` and `sys.path` still name the files of the revision, which all
workers share.

The parent of a process removes the process's folder when it reaps the process (`child_folders.py`). If the parent has
ended first, the process removes its folder itself. If the process is killed, the base removes the folder before
the base forks the next zygote, or the gateway removes it together with `root`.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePath
from types import ModuleType
from typing import NamedTuple

from ....errors import LauncherError
from ....removal import remove_tree

# A file or folder in the working directory is copied if it has at most this many bytes and entries.
ENTRY_BYTES, ENTRY_FILES = 256 << 10, 32
# All copies of a working directory together have at most this many bytes and entries.
ALL_BYTES, ALL_FILES = 1 << 20, 256
# The variables that set the folders of libraries' caches, and the names of the folders. By default, these libraries use TMPDIR.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TIKTOKEN_CACHE_DIR": "tiktoken", "TFHUB_CACHE_DIR": "tfhub"}

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class WorkingFolder:
    """The working directory and TMPDIR of this process.

    `fork` is a part of a cold start, so the paths are strings. Pathlib would use more of Python's objects, and in a fork, the
    first use of each object copies a page of memory.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.path = f"{root}{os.sep}{os.getpid()}"
        self.work, self.tmp = f"{self.path}{os.sep}work", f"{self.path}{os.sep}tmp"
        self._parent = os.getppid()
        # What `note_import` finds: the working directory (relative to `work` if it is below `work`), the entries of `work`,
        # and the modules and variables whose values are paths in this folder.
        self._directory = ""
        self._left: list[_Entry] = []
        self._paths: list[tuple[ModuleType, str]] = []

    @classmethod
    def of_code(cls, root: str, code: Path) -> WorkingFolder:
        """Make a folder for this process with a function's code, and enter it. Raise LauncherError."""
        made = cls(root)
        made._make(_read(code))
        made._enter()
        for variable, name in CACHES.items():
            os.environ.setdefault(variable, os.path.join(root, "caches", name))  # noqa: PTH118
        return made

    def fork(self) -> WorkingFolder:
        """Make a folder for this process, which was forked from this folder's process, and enter it. Raise LauncherError."""
        made = WorkingFolder(self.root)
        made._make(self._left)
        made._enter(forked_from=self)
        if self._directory:
            with suppress(OSError):
                os.chdir(os.path.join(made.work, self._directory))  # noqa: PTH118
        for module, name in self._paths:
            value = getattr(module, name)
            setattr(module, name, type(value)(f"{made.path}{str(value)[len(self.path) :]}"))
        return made

    def note_import(self, code: Path) -> None:
        """Find what `fork` repeats: the working directory that the import has chosen, the entries of `work`, and the variables
        of the function's modules whose values are paths in this folder. `fork` replaces these paths by paths in the fork's own
        folder. If the import has chosen a directory of the code, change to the same directory in `work`.
        """
        with suppress(OSError):
            directory = Path.cwd()
            for folder in (self.work, code):
                if directory.is_relative_to(real := os.path.realpath(folder)):
                    directory = directory.relative_to(real)
            self._directory = "" if directory == Path() else str(directory)
            os.chdir(Path(self.work, directory))
        self._left = _read(self.work)
        self._paths = [
            (module, name)
            for module in list(sys.modules.values())
            if _is_below(module, code) or _is_below(module, self.work)
            for name, value in vars(module).items()
            if (type(value) is str or isinstance(value, PurePath)) and self.holds(value)
        ]

    @property
    def copied(self) -> list[str]:
        """The files that a fork has in its working directory, relative to it."""
        return [one.name for entry in self._left for one in entry.copies if one.content is not None]

    def holds(self, path: str | PurePath) -> bool:
        """Return True if the path is this folder, or in it."""
        return f"{path}{os.sep}".startswith(f"{self.path}{os.sep}")

    def remove_if_orphaned(self) -> None:
        """At the end of this process, remove its folder if the parent, which would remove it, has ended."""
        if os.getppid() != self._parent:
            remove_tree(self.path)

    def _make(self, entries: list[_Entry]) -> None:
        try:
            self._make_empty()
            os.mkdir(self.work, 0o700)  # noqa: PTH102
            os.mkdir(self.tmp, 0o700)  # noqa: PTH102
            for entry in entries:
                entry.write(f"{self.work}{os.sep}")
        except OSError as error:
            message = f"A process has no working folder: {error.strerror} ({error.filename})."
            remedy = "Free space for temporary files, or set resources.tmp_mb or the gateway's TMPDIR."
            raise LauncherError(message, remedy=remedy) from error

    def _make_empty(self) -> None:
        try:
            os.mkdir(self.path, 0o700)  # noqa: PTH102
        except FileExistsError:
            # Remove the folder, which is left from an ended process with the same pid.
            remove_tree(self.path)
            os.mkdir(self.path, 0o700)  # noqa: PTH102
        except FileNotFoundError:
            # Make the root again, which something has removed, such as a program that tidies /tmp.
            os.makedirs(self.path, 0o700)  # noqa: PTH103

    def _enter(self, *, forked_from: WorkingFolder | None = None) -> None:
        os.chdir(self.work)
        # Keep the folder for temporary files if the import has chosen another folder than TMPDIR.
        if forked_from is None or os.environ.get("TMPDIR") == forked_from.tmp:
            os.environ["TMPDIR"] = self.tmp
        if forked_from is None or tempfile.tempdir == forked_from.tmp:
            tempfile.tempdir = None
        if (process := sys.modules.get("multiprocessing.process")) is not None:
            process.current_process()._config.pop("tempdir", None)  # noqa: SLF001  multiprocessing has no other way


def _is_below(module: ModuleType, folder: str | Path) -> bool:
    # Read `__file__` without `__getattr__`, which imports something in modules that are lazy.
    file = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(file, str) and file.startswith(f"{folder}{os.sep}")


class _Copy(NamedTuple):
    """A small file, a folder without its entries, or a link. It is kept in memory, so that a starting worker need not read it."""

    name: str
    """The path in the working directory."""
    content: bytes | str | None
    """The bytes of a file, the target of a link, or None for a folder."""
    mode: int = 0o777
    times: tuple[int, int] = (0, 0)
    """When a file was last read and written, in nanoseconds. Web servers send the time of the last write."""

    def write(self, folder: str) -> None:
        path = folder + self.name
        if self.content is None:
            os.mkdir(path)  # noqa: PTH102
        elif isinstance(self.content, str):
            os.symlink(self.content, path)  # noqa: PTH211
        else:
            file, content = os.open(path, _NEW_FILE, self.mode), self.content
            try:
                while content:
                    content = content[os.write(file, content) :]
                os.utime(file, ns=self.times)
            finally:
                os.close(file)


class _Entry(NamedTuple):
    """An entry of a working directory: copies of the original entry and of all entries below it, or a link to the original."""

    name: str
    link: str
    copies: list[_Copy]

    def write(self, folder: str) -> None:
        """Write the copies. If there are no copies, or no space for them, write the link, which needs almost no space."""
        with suppress(OSError):
            for one in self.copies:
                one.write(folder)
            if self.copies:
                return
        remove_tree(folder + self.name)
        Path(folder, self.name).unlink(missing_ok=True)
        os.symlink(self.link, folder + self.name)  # noqa: PTH211


def _read(source: str | Path) -> list[_Entry]:
    """Return the entries of a folder: copies in memory as long as they are small, else links. Raise OSError."""
    left_bytes, left_files, entries = ALL_BYTES, ALL_FILES, list[_Entry]()
    with os.scandir(source) as found:
        for entry in sorted(found, key=lambda one: one.name):
            # Leave out compiled code, because Python makes it again.
            if entry.name == "__pycache__":
                continue
            if entry.is_symlink():
                entries.append(_Entry(entry.name, os.readlink(entry.path), []))  # noqa: PTH115
                continue
            copies = _copies(entry, min(left_bytes, ENTRY_BYTES), min(left_files, ENTRY_FILES))
            left_bytes -= sum(len(one.content) for one in copies if isinstance(one.content, bytes))
            left_files -= len(copies)
            entries.append(_Entry(entry.name, entry.path, copies))
    return entries


def _copies(entry: os.DirEntry[str], most_bytes: int, most_files: int) -> list[_Copy]:
    """Return copies of an entry and all entries below it; [] if they are too large or too many, or cannot be copied."""
    above = len(entry.path) - len(entry.name)
    # OSError means that a folder may not be read, or is gone.
    with suppress(OSError):
        found = list(islice(_below(entry), most_files + 1))
        files = (one for one in found if one.is_file(follow_symlinks=False))
        size = sum(one.stat(follow_symlinks=False).st_size for one in files)
        if len(found) <= most_files and size <= most_bytes and all(map(_can_be_copied, found)):
            return [_copy(one, one.path[above:]) for one in found]
    return []


def _below(entry: os.DirEntry[str]) -> Iterator[os.DirEntry[str]]:
    """Yield an entry and all entries below it. A folder comes before its entries."""
    yield entry
    if entry.is_dir(follow_symlinks=False):
        with os.scandir(entry.path) as found:
            for inner in found:
                if inner.name != "__pycache__":
                    yield from _below(inner)


def _can_be_copied(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink()


def _copy(entry: os.DirEntry[str], name: str) -> _Copy:
    if entry.is_symlink():
        return _Copy(name, os.readlink(entry.path))  # noqa: PTH115
    if entry.is_dir():
        return _Copy(name, None)
    facts = entry.stat()
    mode = stat.S_IMODE(facts.st_mode) | stat.S_IWUSR
    return _Copy(name, Path(entry.path).read_bytes(), mode, (facts.st_atime_ns, facts.st_mtime_ns))
