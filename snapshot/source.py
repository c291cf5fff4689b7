"""Where shards' bytes come from: a size and ranged reads straight into the caller's memory.

A folder is the one source so far; object storage and HTTP put the same two methods behind ranges.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from ..errors import SnapshotError

MAX_NAME_CHARS = 1024
_FIRST_PRINTABLE = 0x20


class Source(Protocol):
    """Named, immutable byte strings. `read_into` never makes an intermediate `bytes`."""

    def size(self, name: str) -> int:
        """How many bytes `name` has; SnapshotError if there is no such thing."""
        ...

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        """Fill `view` from `offset` on; returns the bytes written, fewer than asked only at the end."""
        ...


class FolderSource:
    """A folder on this machine. Stateless: a read opens, preads and closes (10 µs, next to 8 MiB).

    The last component of a name may be a symlink, wherever it points: the Hugging Face cache keeps its blobs
    outside the snapshot folder, and whoever can place a link here can place weights here. What a hostile
    *manifest* controls is names alone, so names are held to the folder: no `..`, nothing absolute, and a
    directory inside a name must resolve to one inside the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def size(self, name: str) -> int:
        descriptor = self.open(name)
        try:
            return os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

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
            raise SnapshotError(f"{self._root / name} cannot be read: {error.strerror}.") from error
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
            raise SnapshotError(
                f"{path} cannot be opened: {error.strerror}.",
                remedy="Put the file back, or make the manifest anew.",
            ) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SnapshotError(f"{path} is not a regular file.", remedy="Put the safetensors file there.")
        return descriptor

    def _path(self, name: str) -> Path:
        fault = name_fault(name)
        if fault is not None:
            raise SnapshotError(
                f"{name[:80]!r} is not a file name inside {self._root}: {fault}.",
                remedy="Name files relative to the snapshot's folder.",
            )
        path = self._root / name
        if "/" in name and not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise SnapshotError(
                f"{name!r} leads out of {self._root} through a linked directory.",
                remedy="Link the file itself, or copy the directory.",
            )
        return path


def name_fault(name: str) -> str | None:
    """What is wrong with a file's name as a plain relative one, in words; None if nothing is."""
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME_CHARS:
        return f"it is longer than {MAX_NAME_CHARS} characters"
    if "\\" in name or any(ord(char) < _FIRST_PRINTABLE or "\ud800" <= char <= "\udfff" for char in name):
        return "it holds a backslash, a control character or half a character"
    if name.startswith("/"):
        return "it is absolute"
    if any(part in {"", ".", ".."} for part in name.split("/")):
        return "it holds an empty, '.' or '..' component"
    return None
