"""Keeps spare files, which are files of snapshots that were evicted from a tmpfs. Their memory pages are used again.

Writing to existing pages is faster than allocating new pages, above all through a mapping whose page tables are filled
(docs/snapshot-choices.md). A spare that is used again still contains bytes of another snapshot, so nothing may use a
byte of it before the chunk of that byte is verified.

A file becomes a spare only after its snapshot's folder was locked exclusively and renamed. By then no process
maps the file any more.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from uuid import uuid4

from .stored import allocated_bytes


class Spares:
    """The spare files in `folder`. Lock the tier before calling any method except `map_pages`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: dict[tuple[int, int], memoryview] = {}

    def files(self) -> list[tuple[int, Path]]:
        """Return the size and path of every spare, with the largest first."""
        try:
            found = [(entry.stat().st_size, Path(entry)) for entry in os.scandir(self._folder)]
        except FileNotFoundError:
            return []
        return sorted(found, reverse=True)

    def total_bytes(self) -> int:
        return sum(size_bytes for size_bytes, _ in self.files())

    def put(self, file: Path) -> None:
        """Move `file` to the spares. No process may have the file open or mapped."""
        self._folder.mkdir(exist_ok=True)
        file.replace(self._folder / uuid4().hex)

    def take(self, size_bytes: int, path: Path, mark: Path) -> None:
        """Move a spare, if there is one, to `path`: the smallest that is large enough, or else the largest.

        First create the file `mark`, which records that `path` may hold another snapshot's bytes.
        """
        files = self.files()
        if files and size_bytes:
            mark.touch()
            enough = [spare for found_bytes, spare in files if found_bytes >= size_bytes]
            (enough[-1] if enough else files[0][1]).replace(path)

    def trim(self, limit_bytes: int) -> None:
        """Delete spares, with the smallest first, until the remaining spares have at most `limit_bytes` in total."""
        files = self.files()
        left_bytes = sum(size_bytes for size_bytes, _ in files)
        while files and left_bytes > limit_bytes:
            size_bytes, path = files.pop()
            left_bytes -= size_bytes
            self._mapped.pop(_key(path.stat()), None)
            path.unlink()

    def map_ahead(self) -> None:
        """Map all spares now, so that the next fetch in this process need not wait for the mapping."""
        for _, path in self.files():
            with path.open("r+b") as stream:
                if (memory := self.map_pages(stream.fileno())) is not None:
                    self._mapped[_key(os.fstat(stream.fileno()))] = memory

    def map_pages(self, descriptor: int) -> memoryview | None:
        """Map the open file as shared memory, and fill the page tables. Return None if it is empty or has holes."""
        # Do not map a file with holes: if the tmpfs is full, writing to a hole through a mapping would kill the process
        # (SIGBUS), while pwrite only fails with ENOSPC.
        status = os.fstat(descriptor)
        memory = self._mapped.pop(_key(status), None)
        if not 0 < status.st_size <= allocated_bytes(status):
            return None
        if memory is not None and len(memory) == status.st_size:
            return memory
        return memoryview(mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
