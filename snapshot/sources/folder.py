"""A folder on this machine as a source."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ...errors import CacheError, SnapshotChanged, SourceMissing, SourceUnavailable
from ..publish import publish
from .source import ObjectInfo, name_fault

_COPY_BYTES = 16 << 20


class FolderSource:
    """A folder on this machine. Stateless: a read opens, preads and closes (10 µs, next to 8 MiB).

    The last component of a name may be a symlink, wherever it points: the Hugging Face cache keeps its blobs
    outside the snapshot folder, and whoever can place a link here can place weights here. What a hostile
    *manifest* controls is names alone, so names are held to the folder: no `..`, nothing absolute, and a
    directory inside a name must resolve to one inside the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        return str(self._root)

    def stat(self, name: str) -> ObjectInfo:
        descriptor = self.open(name)
        try:
            return _info(descriptor)
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        return self.stat(name).size_bytes

    def names(self) -> list[str]:
        """Every regular file below, sorted; hidden ones and what hidden and linked folders hold are left out."""
        found = []
        for folder, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = (Path(folder, name) for name in files if not name.startswith("."))
            found += [path.relative_to(self._root).as_posix() for path in paths if path.is_file()]
        return sorted(found)

    def connect(self) -> FolderConnection:
        return FolderConnection(self)

    def put(
        self, name: str, content: Path | bytes, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Copy a file, or write these bytes, as `name`: whole or not at all. CacheError if there is no writing."""
        path = self._path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with publish(path) as stream:
                if isinstance(content, bytes):
                    stream.write(content)
                else:
                    _copy(content, stream, progress)
        except OSError as error:
            raise CacheError(
                f"{path} cannot be written: {error.strerror or error}.",
                remedy="Make room, or name another place.",
            ) from error

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        descriptor = self.open(name)
        done = 0
        try:
            while done < len(view):
                count = os.preadv(descriptor, [view[done:]], offset + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise SourceUnavailable(f"{self._root / name} cannot be read: {error.strerror}.") from error
        finally:
            os.close(descriptor)
        return done

    def open(self, name: str) -> int:
        """A descriptor of the regular file behind `name`, for reading; the caller closes it."""
        path = self._path(name)
        try:
            # O_NONBLOCK: a FIFO in the folder must not hang us; it has no meaning for regular files.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceMissing(
                f"{path} cannot be opened: {error.strerror}.",
                remedy="Put the file back, or make the manifest anew.",
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SourceMissing(f"{path} is not a regular file.", remedy="Put the safetensors file there.")
        return descriptor

    def _path(self, name: str) -> Path:
        fault = name_fault(name)
        if fault is not None:
            raise SourceMissing(
                f"{name[:80]!r} is not a file name inside {self._root}: {fault}.",
                remedy="Name files relative to the snapshot's folder.",
            )
        path = self._root / name
        if "/" in name and not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise SourceMissing(
                f"{name!r} leads out of {self._root} through a linked directory.",
                remedy="Link the file itself, or copy the directory.",
            )
        return path


class FolderConnection:
    """One open file at a time. What was opened stays the same file, whatever its name means by then."""

    def __init__(self, source: FolderSource) -> None:
        self._source = source
        self._name = ""
        self._descriptor = -1
        self._at = self._end = 0
        self._owner = threading.get_ident()
        self._broken_off = False

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        self._owner, self._broken_off = threading.get_ident(), False
        if name != self._name or self._descriptor < 0:
            self.close()
            self._descriptor, self._name = self._source.open(name), name
        info = _info(self._descriptor)
        if version and info.version != version:
            self.close()
            raise SnapshotChanged(
                f"{name} in {self._source.url} was replaced or written to while it was read.",
                remedy="Publish new weights under a new name, and make their manifest anew.",
                details={"object": name},
            )
        self._at, self._end = begin, end
        return info

    def read_into(self, view: memoryview) -> int:
        if self._broken_off:
            raise SourceUnavailable(f"Reading {self._name} was broken off.")
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
            # Not the descriptor: a read in progress would go on with whatever gets its number next.
            self._broken_off = True
            return
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _copy(file: Path, stream: IO[bytes], progress: Callable[[int, int], None] | None) -> None:
    with file.open("rb") as content:
        total_bytes = os.fstat(content.fileno()).st_size
        buffer = memoryview(bytearray(min(_COPY_BYTES, max(1, total_bytes))))
        while count := content.readinto(buffer):
            stream.write(buffer[:count])
            if progress is not None:
                progress(stream.tell(), total_bytes)


def _info(descriptor: int) -> ObjectInfo:
    status = os.fstat(descriptor)
    return ObjectInfo(status.st_size, f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}")
