"""A download brings a snapshot into a user's own folder: resumable, and never over files of others.

While a download runs, the folder holds `.pilotflame.pull`: locked by the downloading process, with the digest
of the snapshot in it. After a crash, the next download thus knows that half a file is a beginning and not
other weights. The manifest is written last.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...errors import CacheError, Cancelled, ManifestError
from ..fetching.arrival import Arrival
from ..fetching.assets import fetch_assets
from ..fetching.fetch import FetchStats, fetch
from ..fetching.landing import ShardTarget, land_existing
from ..format.manifest import MANIFEST_NAME, Manifest, Shard
from ..publish import cannot_write
from ..sources.folder import FolderSource
from ..sources.source import Progress, Source
from .flock import is_at, try_lock
from .stored import allocated_bytes, sync_files

MARK_NAME = ".pilotflame.pull"
_MARK_BYTES = 64
_ELSEWHERE = "Name another folder, or overwrite what is there with --force (force=True)."


def download(
    manifest: Manifest,
    source: Source,
    folder: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
    connections: int | None = None,
    part_bytes: int | None = None,
) -> FetchStats:
    """Bring the snapshot into `folder`, and block until it is there. Files that fit its digests are kept.

    CacheError, with nothing changed, if the folder holds another snapshot's manifest, or links or other bytes
    under names of the snapshot; `force` removes those. Other errors as of `fetch`, and SnapshotCorrupt for an
    asset. A download that was broken off, even by kill -9, is resumed by the next.
    """
    stopped = cancelled or threading.Event()
    if isinstance(source, FolderSource) and Path(source.url).resolve() == folder.resolve():
        raise CacheError(f"{folder} is where the snapshot is.", remedy="Name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _mark(folder) as mark, ExitStack() as opened:
            work = _Download(manifest, folder, mark, force=force)
            work.accept(opened, stopped)
            fetch_assets(manifest, source, folder)
            if not work.arrival.complete:
                (folder / MANIFEST_NAME).unlink(missing_ok=True)
            if progress is not None:
                progress(work.arrival.landed_bytes, manifest.total_bytes)
            stats = fetch(
                work.manifest, source, work.targets, work.arrival,
                connections=connections, part_bytes=part_bytes, progress=progress, cancelled=stopped,
            )  # fmt: skip
            # The files first: a folder that has a manifest is whole.
            sync_files(folder, manifest)
            work.manifest.write(folder / MANIFEST_NAME)
            (folder / MARK_NAME).unlink()
            return stats
    except OSError as error:
        raise cannot_write(Path(error.filename or folder), error) from error


class _Download:
    """The files of one download, alone in its folder."""

    def __init__(self, manifest: Manifest, folder: Path, mark: int, *, force: bool) -> None:
        """`mark` is an open file with the digest of the snapshot that was downloaded here before, if any."""
        self._folder = folder
        self._mark = mark
        self._force = force
        self._present, self._other = _present(folder, manifest)
        # An order of first touch that was recorded here is kept if the snapshot was published without one.
        touched = self._present.first_touch if self._present and not manifest.first_touch else ()
        self.manifest = manifest.model_copy(update={"first_touch": touched}) if touched else manifest
        self._known = self._present is not None or os.pread(mark, _MARK_BYTES, 0) == manifest.digest.encode()
        self.targets: list[ShardTarget] = []
        self.arrival = Arrival(manifest)

    def accept(self, opened: ExitStack, cancelled: threading.Event) -> None:
        """Open the files at full size and land the chunks that fit. Nothing changes before the checks."""
        if self._other and not self._force:
            fault = f"{self._folder} holds the manifest of another snapshot ({self._other})."
            raise CacheError(fault, remedy=_ELSEWHERE)
        foreign = self._foreign_files()
        self._check_room(foreign)
        paths = [self._folder / shard.name for shard in self.manifest.shards]
        sure = self._known or self._force or not any(path.exists() for path in paths)
        if sure:
            self._write_mark()
        if self._force:
            for path in (*foreign, *([self._folder / MANIFEST_NAME] if self._other else [])):
                path.unlink()
        with ExitStack() as undo:
            held = [self._open(shard, opened, undo) for shard in self.manifest.shards]
            land_existing(self.manifest, self.targets, self.arrival, cancelled)
            if not sure:
                self._check_held(held, cancelled)
                self._write_mark()
            undo.pop_all()

    def _write_mark(self) -> None:
        digest = self.manifest.digest.encode()
        if os.pread(self._mark, _MARK_BYTES, 0) != digest:
            os.ftruncate(self._mark, 0)
            os.pwrite(self._mark, digest, 0)
            os.fsync(self._mark)

    def _foreign_files(self) -> Sequence[Path]:
        """The files that have a name of the snapshot's and cannot be a beginning of it."""
        found = []
        for file in self.manifest.files:
            path = self._folder / file.name
            if not path.parent.resolve().is_relative_to(self._folder.resolve()):
                raise CacheError(f"{path} leads out of the folder by a link.", remedy="Remove the link.")
            if (fault := self._fault(path, file.size_bytes)) and not self._force:
                raise CacheError(f"{path} is not the snapshot's: {fault}.", remedy=_ELSEWHERE)
            # Never write into an inode that may be mapped elsewhere: a finetune's file has the same size.
            if fault or (self._force and not self._known and path.is_file()):
                found.append(path)
        return found

    def _fault(self, path: Path, size_bytes: int) -> str:
        try:
            status = path.lstat()
        except FileNotFoundError:
            return ""
        if not stat.S_ISREG(status.st_mode):
            return "it is no regular file"
        # An empty file is what a crash leaves between creating a file and giving it its size.
        if status.st_size in {0, size_bytes} or self._known:
            return ""
        return f"it has {status.st_size} bytes, {size_bytes} expected"

    def _check_room(self, foreign: Sequence[Path]) -> None:
        needed_bytes = 0
        for file in self.manifest.files:
            path = self._folder / file.name
            missing_bytes = file.size_bytes - (allocated_bytes(path.lstat()) if path.is_file() else 0)
            # A foreign file is removed, which frees its bytes.
            needed_bytes += missing_bytes if path in foreign else max(0, missing_bytes)
        if needed_bytes > (free_bytes := shutil.disk_usage(self._folder).free):
            fault = f"{self._folder} has {free_bytes} bytes free, and {needed_bytes} are still to come."
            raise CacheError(fault, remedy="Make room, or name a folder on another disk.")

    def _open(self, shard: Shard, opened: ExitStack, undo: ExitStack) -> bool:
        """Open one shard's file at full size. Return True if it had bytes."""
        path = self._folder / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        opened.callback(os.close, descriptor)
        if new:
            undo.callback(path.unlink, missing_ok=True)
        held_bytes = os.fstat(descriptor).st_size
        if held_bytes != shard.size_bytes:
            os.ftruncate(descriptor, shard.size_bytes)
        self.targets.append(ShardTarget(str(path), descriptor))
        return held_bytes > 0

    def _check_held(self, held: Sequence[bool], cancelled: threading.Event) -> None:
        """Refuse files that no download began and that differ from the snapshot anywhere (a finetune's)."""
        if cancelled.is_set():
            raise Cancelled("The download was cancelled.")
        for index, shard in enumerate(self.manifest.shards):
            chunks = self.arrival.chunks.covering(index, 0, shard.size_bytes)
            if held[index] and shard.size_bytes and not self.arrival.has(*chunks):
                path = self._folder / shard.name
                raise CacheError(f"{path} is not the snapshot's: it has other bytes.", remedy=_ELSEWHERE)


@contextmanager
def _mark(folder: Path) -> Iterator[int]:
    """Open and lock the folder's mark: no other download writes into the folder meanwhile."""
    path = folder / MARK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        if not try_lock(descriptor, exclusive=True) or not is_at(descriptor, path):
            fault = f"Another pull into {folder} is running."
            raise CacheError(fault, remedy="Wait for it, or name another folder.")
        try:
            yield descriptor
        except BaseException:
            # An empty mark: refused before anything was begun.
            if not os.fstat(descriptor).st_size:
                path.unlink(missing_ok=True)
            raise
    finally:
        os.close(descriptor)


def _present(folder: Path, manifest: Manifest) -> tuple[Manifest | None, str]:
    """The folder's manifest if it is this snapshot's, and what to call it if it is another's."""
    if not os.path.lexists(folder / MANIFEST_NAME):
        return None, ""
    try:
        found = Manifest.read(folder / MANIFEST_NAME)
    except ManifestError:
        return None, "one that cannot be read"
    digest = found.digest
    return (found, "") if digest == manifest.digest else (None, digest[:16])
