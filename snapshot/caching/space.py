"""Adds up the bytes that a tier uses, and deletes snapshots and spare files to make room.

Spare files are files of snapshots that were evicted from a tmpfs. Their memory pages are used again. Writing to existing
pages is faster than allocating new pages, above all through a mapping whose page tables are filled
(docs/decisions.md). A spare that is used again still contains bytes of another snapshot, so nothing may use a
byte of it before the chunk of that byte is verified.

A file becomes a spare only after its snapshot's folder was locked exclusively and renamed. By then no process
maps the file any more.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal
from uuid import uuid4

from ...errors import CacheError, StorageFull
from ..format.manifest import MANIFEST_NAME
from .flock import lock_folder
from .stored import PART, Stored, allocated_bytes, is_mounted, list_stored, read_stored

TierKind = Literal["tmpfs", "disk"]
LEAST_SPARE_BYTES = 64 << 10


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


class TierCounts:
    """Counts the bytes that this process brought into a tier, verified there and evicted. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.received_bytes = 0
        self.verified_bytes = 0
        self.evicted_bytes = 0

    def add(self, *, received: int = 0, verified: int = 0, evicted: int = 0) -> None:
        """Count further bytes."""
        with self._lock:
            self.received_bytes += received
            self.verified_bytes += verified
            self.evicted_bytes += evicted


class TierSpace:
    """The space of a tier. For the arguments see `Tier`. Lock the tier before calling any method except `used_bytes`."""

    def __init__(self, root: Path, budget_bytes: int, kind: TierKind, spare_bytes: int) -> None:
        self._root, self._snapshots, self._budget_bytes = root, root / "snapshots", budget_bytes
        self._kind, self._spare_bytes = kind, spare_bytes
        self.spares = Spares(root / "spare")
        self.counts = TierCounts()

    def used_bytes(self) -> int:
        """Return the size of all spare files and snapshots, including snapshots that are being fetched."""
        return sum(one.size_bytes for one in list_stored(self._snapshots)) + self.spares.total_bytes()

    def free(self, digest: str, size_bytes: int) -> None:
        """Evict other snapshots until this snapshot fits. If it cannot fit, evict none and raise CacheError."""
        if size_bytes > self._budget_bytes:
            fault = f"{self._root} takes {self._budget_bytes} bytes, the snapshot has {size_bytes}."
            raise CacheError(fault, remedy="Give the tier a larger budget.")
        stored = list_stored(self._snapshots)
        own_bytes = sum(item.allocated_bytes for item in stored if item.digest == digest)
        others = [item for item in stored if item.digest != digest]
        over_bytes = sum(item.size_bytes for item in others) + size_bytes - self._budget_bytes
        short_bytes = size_bytes - own_bytes - self._available_bytes(others)
        chosen: list[tuple[Path, int]] = []
        for item in others:
            if over_bytes <= 0 and short_bytes <= 0:
                break
            descriptor = lock_folder(item.folder, exclusive=True)
            if descriptor is not None:
                chosen.append((item.folder, descriptor))
                over_bytes -= item.size_bytes
                short_bytes -= item.allocated_bytes + item.outstanding_bytes
        if over_bytes > 0 or short_bytes > 0:
            for _, descriptor in chosen:
                os.close(descriptor)
            raise self._full(size_bytes, over_bytes)
        self.discard(chosen)

    def _available_bytes(self, stored: Sequence[Stored]) -> int:
        """Return the bytes that are free or in spare files, minus the bytes that `stored` still has to allocate."""
        free_bytes = shutil.disk_usage(self._root).free
        return free_bytes + self.spares.total_bytes() - sum(item.outstanding_bytes for item in stored)

    def _full(self, size_bytes: int, over_bytes: int) -> CacheError:
        if over_bytes > 0:
            fault = f"{self._root} is full: of {self._budget_bytes} bytes, {over_bytes} too many are in use."
            return CacheError(fault, remedy="Give it a larger budget, or stop workers that map snapshots.")
        fault = f"The file system of {self._root} has too few bytes free for a snapshot of {size_bytes}."
        return StorageFull(fault, remedy="Make room on it, or put the cache elsewhere.")

    def discard(self, folders: Sequence[tuple[Path, int]]) -> None:
        """Delete snapshots and close their locks. `folders` are pairs of a folder and the descriptor that locks it."""
        with ExitStack() as locks:
            for _, descriptor in folders:
                locks.callback(os.close, descriptor)
            for folder, _ in folders:
                self._delete(folder)

    def _delete(self, folder: Path) -> None:
        # Rename the folder first. If this process is killed, no incomplete folder looks like a snapshot.
        self.counts.add(evicted=read_stored(folder).allocated_bytes)
        gone = self._root / "trash" / uuid4().hex
        gone.parent.mkdir(exist_ok=True)
        if mounted := is_mounted(folder):
            gone.mkdir()
            (folder / "files").rename(gone / "files")
        else:
            folder.rename(gone)
        # Make no spares of mounted files: a handler in a container can have the files open without a lock, and must not see
        # another snapshot's bytes.
        if self._kind == "tmpfs" and not mounted and not (gone / PART).exists():
            for file in list((gone / "files").rglob("*")):
                # Keep only large files, because using the pages of smaller files again would save too little time.
                large = file.is_file() and file.stat().st_size >= LEAST_SPARE_BYTES
                if large and file.name != MANIFEST_NAME:
                    self.spares.put(file)
        shutil.rmtree(gone, ignore_errors=True)

    def trim(self, digest: str = "", size_bytes: int = 0) -> None:
        """Delete spares beyond `spare_bytes`, and spares for which the budget or the file system has no room.

        If `digest` is given, the size of that snapshot counts as `size_bytes`, whatever its folder holds.
        """
        if not self.spares.files():
            return
        stored = list_stored(self._snapshots)
        used_bytes = sum(item.size_bytes for item in stored if item.digest != digest) + size_bytes
        left_bytes = min(self._budget_bytes - used_bytes, self._available_bytes(stored))
        self.spares.trim(max(0, min(self._spare_bytes, left_bytes)))


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
