"""Spare files: those of evicted snapshots on tmpfs, kept for their pages.

Writing over pages that are there is faster than allocating them, most of all through a mapping whose page tables are
filled (kept and fresh in docs/snapshot-choices.md). Whoever takes a spare gets a file with foreign bytes in it, so nothing in it counts before it was verified.

A spare comes here only from a snapshot whose folder was locked exclusively and renamed: nobody maps it any more.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from .stored import allocated_bytes


@dataclass(frozen=True, slots=True)
class SpareFile:
    path: Path
    size_bytes: int


class Spares:
    """The spare files in `folder`. All but `touched` is called with the tier locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._warm: dict[tuple[int, int], mmap.mmap] = {}
        self._lock = threading.Lock()

    def files(self) -> list[SpareFile]:
        """What is there, the largest first."""
        try:
            found = [SpareFile(Path(entry), entry.stat().st_size) for entry in os.scandir(self._folder)]
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda spare: -spare.size_bytes)

    def total_bytes(self) -> int:
        return sum(spare.size_bytes for spare in self.files())

    def put(self, file: Path) -> None:
        """Take over `file`, which nobody has open or mapped."""
        self._folder.mkdir(exist_ok=True)
        file.replace(self._folder / uuid4().hex)

    def take(self, size_bytes: int, path: Path) -> bool:
        """Move the best fitting spare to `path`, whatever its size: the smallest that suffices, else the largest."""
        files = self.files()
        if not files or not size_bytes:
            return False
        enough = [spare for spare in files if spare.size_bytes >= size_bytes]
        (enough[-1] if enough else files[0]).path.replace(path)
        return True

    def trim(self, limit_bytes: int) -> None:
        """Delete spares, the smallest first, until the rest has at most `limit_bytes`."""
        files = self.files()
        left_bytes = sum(spare.size_bytes for spare in files)
        while files and left_bytes > limit_bytes:
            spare = files.pop()
            left_bytes -= spare.size_bytes
            self._forget(spare.path)
            spare.path.unlink()

    def warm(self) -> None:
        """Map what is there now, in this process, so that a fetch need not."""
        for spare in self.files():
            descriptor = os.open(spare.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = _map_whole(descriptor)
                if memory is not None:
                    with self._lock:
                        self._warm[_key(descriptor)] = memory
            finally:
                os.close(descriptor)

    def touched(self, descriptor: int) -> memoryview | None:
        """The open file's bytes, mapped shared, with all pages there and mapped; None if it has holes.

        Through holes a full tmpfs would kill us (SIGBUS) where a write says ENOSPC.
        """
        with self._lock:
            memory = self._warm.pop(_key(descriptor), None)
        if memory is None or len(memory) != os.fstat(descriptor).st_size or not _is_whole(descriptor):
            memory = _map_whole(descriptor)
        return None if memory is None else memoryview(memory)

    def _forget(self, path: Path) -> None:
        status = path.stat()
        with self._lock:
            self._warm.pop((status.st_dev, status.st_ino), None)


def _map_whole(descriptor: int) -> mmap.mmap | None:
    if not _is_whole(descriptor):
        return None
    size_bytes = os.fstat(descriptor).st_size
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _is_whole(descriptor: int) -> bool:
    status = os.fstat(descriptor)
    return 0 < status.st_size <= allocated_bytes(status)


def _key(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
