"""Defines the source that reads and writes a folder of this machine."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from ...errors import SourceMissing, SourceUnavailable
from ..publish import cannot_write, publish
from .source import ObjectInfo, changed, name_fault, opened

_COPY_BYTES = 1 << 20


class FolderSource:
    """A folder. Each read opens and closes the file (10 µs), so no file stays open.

    The last component of a name may be a symlink to anywhere, because the Hugging Face cache stores its blobs outside
    the snapshot folder. Such links are safe: a user who can create a link in this folder can also create weights in it.
    But names may come from a hostile manifest, so a name itself must not lead out of the folder: it must not be absolute
    or contain `..`, and its directories must not be links that lead out of the folder.
    """

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self._root = root

    def stat(self, name: str) -> ObjectInfo:
        descriptor = self.open(name)
        try:
            return object_info(descriptor)
        finally:
            os.close(descriptor)

    def names(self) -> list[str]:
        """Return the names of all files in this folder and its subfolders, sorted.

        Hidden files and the contents of hidden or linked subfolders are left out.
        """
        found = []
        for folder, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = (Path(folder, name) for name in files if not name.startswith("."))
            found += [path.relative_to(self._root).as_posix() for path in paths if path.is_file()]
        return sorted(found)

    def connect(self) -> FolderConnection:
        return FolderConnection(self)

    def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
        """Store `content` atomically as file `name`. Raise CacheError if `content` cannot be read or the file cannot be written."""
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with opened(content) as given, publish(path) as stream:
                while block := given.read(_COPY_BYTES):
                    stream.write(block)
                    if sent is not None:
                        sent(len(block))
        except OSError as error:
            raise cannot_write(path, error) from error

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        descriptor = self.open(name)
        try:
            return read_at(descriptor, view, offset)
        except OSError as error:
            raise SourceUnavailable(f"{self._root / name} cannot be read: {error.strerror}.") from error
        finally:
            os.close(descriptor)

    def open(self, name: str) -> int:
        """Open file `name` and return its descriptor. Raise SourceMissing if there is no regular file."""
        path = self._path(name)
        try:
            # O_NONBLOCK prevents a hang on a FIFO, and has no effect on regular files.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            fault = f"{path} cannot be opened: {error.strerror}."
            raise SourceMissing(fault, remedy="Restore it, or create the manifest again.") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceMissing(f"{path} is not a regular file.", remedy="Put the safetensors file there.")
        return descriptor

    def _path(self, name: str) -> Path:
        if fault := name_fault(name):
            fault = f"{name[:80]!r} is not a file name inside {self._root}: {fault}."
            raise SourceMissing(fault, remedy="Name files relative to the snapshot's folder.")
        path = self._root / name
        try:
            inside = "/" not in name or path.parent.resolve().is_relative_to(self._root.resolve())
        # Before Python 3.13, `resolve` raises RuntimeError for a loop of symlinks.
        except (OSError, RuntimeError) as error:
            fault = f"{path.parent} cannot be followed: {error}."
            raise SourceMissing(fault, remedy="Check the links in this path.") from error
        if not inside:
            fault = f"{name!r} leads out of {self._root} through a linked directory."
            raise SourceMissing(fault, remedy="Link the file itself, or copy the directory.")
        return path


class FolderConnection:
    """A Connection to a folder. It keeps one file open between ranges, and still reads from this file if another file replaces it."""

    used = False

    def __init__(self, source: FolderSource) -> None:
        self._source = source
        self._name = ""
        self._descriptor = -1
        self._at = self._end = 0
        self._owner = threading.get_ident()
        self._interrupted = False

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        self._owner, self._interrupted = threading.get_ident(), False
        if name != self._name or self._descriptor < 0:
            self.close()
            self._descriptor, self._name = self._source.open(name), name
        info = object_info(self._descriptor)
        if version and info.version != version:
            self.close()
            raise changed(f"{self._source.url}/{name}", name, "it was replaced or written to")
        self._at, self._end = begin, end
        return info

    def read_into(self, view: memoryview) -> int:
        if self._interrupted:
            raise SourceUnavailable(f"Reading {self._name} was interrupted.")
        wanted = min(len(view), self._end - self._at)
        if wanted == 0:
            return 0
        try:
            count = os.preadv(self._descriptor, [view[:wanted]], self._at)
        except OSError as error:
            raise SourceUnavailable(f"{self._name} cannot be read: {error.strerror}.") from error
        if count == 0:
            raise SourceUnavailable(f"{self._name} ends at byte {self._at}, before {self._end}.")
        self._at += count
        return count

    def close(self) -> None:
        if threading.get_ident() != self._owner:
            # Leave the descriptor open. If this thread closed it, another file could be opened with the same number,
            # and a read in progress would read from that file.
            self._interrupted = True
            return
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def release(self) -> None:
        self.close()


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view` with the bytes of an open file from `offset` on. Return their number, which is smaller only at the file's end."""
    done = 0
    while done < len(view) and (count := os.preadv(descriptor, [view[done:]], offset + done)):
        done += count
    return done


def object_info(descriptor: int) -> ObjectInfo:
    """Return the size and version of an open file. Writing to or replacing the file changes the version."""
    status = os.fstat(descriptor)
    return ObjectInfo(status.st_size, f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}")
