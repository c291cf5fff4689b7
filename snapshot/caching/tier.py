"""Manages a tier: a folder on this machine that holds snapshots, within a budget of bytes.

    <root>/lock                       locked, for a short time, to make room, start a fetch, or evict
    <root>/snapshots/<digest>/        one snapshot; users lock it (flock) shared, eviction exclusively
        files/                        its shards at full size and its assets; its manifest once published
        fetching                      locked exclusively by the process that fetches the snapshot
        socket                        through which that process tells followers which chunks have landed
        mounted                       locked shared while containers have the folder mounted: eviction then
                                      leaves the folder, without `files`
        reused                        exists while `files`, made of spares, may hold bytes of another snapshot
        part                          if only a part of the snapshot is needed: the number of needed bytes
        digests                       while weights without a manifest are fetched: the digests of the landed chunks
    <root>/trash/                     snapshots that were evicted and are being deleted
    <root>/spare/                     files of evicted snapshots, kept to use their pages again (tmpfs only)

To publish a snapshot, its manifest is written, last and atomically. Its files never move, so paths and mappings stay
valid. Sizes are always read from the files, because a counter or journal could be wrong after a crash.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ...errors import CacheError
from ..format.manifest import Manifest
from .flock import LOCK_TIMEOUT_S, FolderLock, is_at, lock_folder, lock_shared, locked_file, try_lock
from .space import TierKind, TierSpace
from .stored import PART, REUSED, Stored, is_mounted, is_whole, list_stored

STALE_AFTER_S = 86_400.0
SWEEP_TIMEOUT_S = 1.0


@dataclass(eq=False)
class Tier:
    """Snapshots in folder `root`: at most `budget_bytes` of shards, assets and spare files.

    `kind` is "tmpfs" for memory. Then nothing is synced, since the files would not survive a power loss anyway, and up
    to `spare_bytes` of evicted files are kept to use their pages again. `kind` is "disk" for a disk. Then a snapshot's
    files are synced before it is published.
    """

    root: Path
    budget_bytes: int
    kind: TierKind = "disk"
    spare_bytes: int = 0
    read_only: ClassVar[bool] = False
    """True if this process can only follow the fetches of other processes."""

    def __post_init__(self) -> None:
        self.space = TierSpace(self.root, self.budget_bytes, self.kind, self.spare_bytes)

    def folder(self, digest: str) -> Path:
        return self.root / "snapshots" / digest

    def folders(self, ending: str) -> Sequence[Path]:
        """Return the folders of the snapshots whose digest has this ending, the most recently used first."""
        found = []
        with suppress(OSError), os.scandir(self.root / "snapshots") as entries:
            for entry in entries:
                if entry.name.endswith(ending):
                    # Another process may evict the snapshot meanwhile.
                    with suppress(OSError):
                        found.append((entry.stat().st_mtime, Path(entry)))
        return [folder for _, folder in sorted(found, reverse=True)]

    def has(self, digest: str) -> bool:
        """Return True if the snapshot has files in this tier: complete, being fetched, or left incomplete."""
        # Path.is_dir would raise if a parent folder may not be read.
        return os.path.isdir(self.folder(digest) / "files")  # noqa: PTH112

    def fetches(self, digest: str) -> bool:
        """Return True if a process is fetching the snapshot into this tier."""
        try:
            descriptor = os.open(self.folder(digest) / "fetching", os.O_RDONLY)
        except OSError:
            return False
        try:
            return not try_lock(descriptor, exclusive=False)
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold the tier's lock. Only one thread at a time can hold it. Raise CacheError after `timeout_s`."""
        path = self.root / "lock"
        while True:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with ExitStack() as lock:
                try:
                    descriptor = lock.enter_context(locked_file(path, timeout_s))
                except FileNotFoundError:
                    # Another process has removed the root since `mkdir` (see `release`).
                    continue
                # The file may have been removed during the wait. Then lock the new file.
                if is_at(descriptor, path):
                    yield
                    return

    def ready(self, digest: str, manifest: Manifest) -> FolderLock | None:
        """Lock the snapshot's folder against eviction. Return None if it is not published or not complete."""
        folder = self.folder(digest)
        try:
            lock = lock_shared(folder)
            if lock is None and folder.is_dir():
                # Another process has locked the folder to evict it, and holds the tier's lock too. Try again after it
                # has released the tier's lock.
                with self.locked():
                    lock = lock_shared(folder)
            if lock is None or not is_whole(folder / "files", manifest):
                return None
        except OSError:
            # The snapshot counts as absent. If it has to be stored in this tier, the error is raised then.
            return None
        # Record the time of use. If the cache is read-only, this fails, which is allowed. time_ns is finer than the
        # time that the kernel would set.
        with suppress(OSError):
            os.utime(lock.descriptor, ns=(time.time_ns(),) * 2)
        return lock

    def list(self) -> Sequence[Stored]:
        """Return all snapshots of this tier, complete or not, with the least recently used first."""
        return list_stored(self.root / "snapshots")

    def make_room(self, digest: str, manifest: Manifest) -> None:
        """Create the snapshot's files at full size. Evict other snapshots to make room. Lock the tier first.

        Raise CacheError, without evicting any snapshot, if evictions would not make enough room. Raise OSError if a
        file cannot be created. In both cases, a folder that did not exist before does not exist afterwards.
        """
        size_bytes, folder = manifest.needed_bytes + manifest.assets_bytes, self.folder(digest)
        new = not self.has(digest)
        self.space.free(digest, size_bytes)
        try:
            (folder / "files").mkdir(mode=0o700, parents=True, exist_ok=True)
            if manifest.part is not None:
                (folder / PART).write_text(str(size_bytes), "ascii")
            for index in sorted(
                range(len(manifest.shards)), key=lambda index: -manifest.shards[index].size_bytes
            ):
                self._make_file(folder, manifest, index)
        except OSError:
            if new:
                shutil.rmtree(folder / "files", ignore_errors=True)
                self.remove_empty(folder)
            raise
        finally:
            self.space.trim(digest, size_bytes)

    def evict(self, digest: str) -> None:
        """Remove a snapshot if it is in this tier. Raise CacheError if the snapshot is in use."""
        if not self.has(digest):
            return
        with self.locked():
            # Another process may have evicted the snapshot before this process got the lock.
            if not self.has(digest):
                return
            if not self.discard_unused(digest):
                remedy = "Stop the workers that have it mapped, or the fetches of it and from it."
                raise CacheError(f"Snapshot {digest} in {self.root} is in use.", remedy=remedy)
            self.space.spares.map_ahead()

    def discard_unused(self, digest: str) -> bool:
        """Delete a snapshot that is in this tier. Return False if the snapshot is in use. Lock the tier first."""
        folder = self.folder(digest)
        if (descriptor := lock_folder(folder, exclusive=True)) is None:
            return False
        self.space.discard([(folder, descriptor)])
        self.space.trim()
        return True

    def remove_empty(self, folder: Path) -> None:
        """Remove a snapshot's folder if it has no files and no container has it mounted. Lock the tier first."""
        if not (folder / "files").exists() and not is_mounted(folder):
            shutil.rmtree(folder, ignore_errors=True)

    def drop_spares(self) -> None:
        """Delete the spare files, because memory is short. Errors are ignored."""
        if self.root.is_dir():
            with suppress(OSError, CacheError), self.locked():
                self.space.spares.trim(0)

    def release(self) -> None:
        """Delete the spare files and, if the tier holds no snapshots, its folders. Errors are ignored."""
        with suppress(OSError, CacheError), self.locked():
            self.space.spares.trim(0)
            for name in ("snapshots", "trash", "spare"):
                with suppress(FileNotFoundError):
                    (self.root / name).rmdir()
            (self.root / "lock").unlink()
            self.root.rmdir()

    def sweep(self) -> None:
        """Delete files that crashed processes left: the trash, and incomplete snapshots that were unused for a day."""
        if not self.root.is_dir():
            return
        with suppress(OSError, CacheError), self.locked(SWEEP_TIMEOUT_S):
            shutil.rmtree(self.root / "trash", ignore_errors=True)
            for folder in (self.root / "snapshots").glob("*"):
                self.remove_empty(folder)
            stale_s = time.time() - STALE_AFTER_S
            stale = [stored.folder for stored in self.list() if not stored.ready and stored.used_s < stale_s]
            locked = [(folder, lock_folder(folder, exclusive=True)) for folder in stale]
            gone = [(folder, descriptor) for folder, descriptor in locked if descriptor is not None]
            self.space.discard(gone)
            # Trim only if snapshots were deleted: `trim` uses the limits of this process, and another process may keep
            # more spares.
            if gone:
                self.space.trim()

    def _make_file(self, folder: Path, manifest: Manifest, index: int) -> None:
        size_bytes = manifest.shards[index].size_bytes
        path = folder / "files" / manifest.shards[index].name
        path.parent.mkdir(parents=True, exist_ok=True)
        # A handler in a container can read the files before their chunks have landed, and must not see a spare's bytes.
        # A fetch of a part never writes the bytes that it does not need, so the bytes of a spare would stay there.
        reuses = self.kind == "tmpfs" and manifest.part is None and not is_mounted(folder)
        if reuses and not path.exists():
            self.space.spares.take(size_bytes, path, folder / REUSED)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                os.ftruncate(descriptor, size_bytes)
            if size_bytes and self.kind == "disk":
                # Reserve the space now: on a full disk, posix_fallocate raises ENOSPC here and not during the fetch.
                # `land_existing` still skips bytes that were never written, because SEEK_DATA skips allocated bytes without
                # data.
                for begin, end in manifest.needed_extents(index):
                    os.posix_fallocate(descriptor, begin, end - begin)
        finally:
            os.close(descriptor)
