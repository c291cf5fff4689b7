"""Downloads a snapshot into a user's own folder. A download can be resumed, and replaces foreign files only with `force`.

While a download runs, the folder holds a mark: the file `.pilotflame.pull`. It contains the digest of the snapshot, and
the downloading process has locked it. If that process is killed, the next download knows from the mark that the
files in the folder are a part of this snapshot, and not other weights. The manifest is written last.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...errors import CacheError, ManifestError
from ..fetching.arrival import Arrival
from ..fetching.assets import fetch_assets, holds
from ..fetching.digest_journal import learned_digests
from ..fetching.fetch import FetchStats, fetch
from ..fetching.landing import ShardTarget, land_existing
from ..fetching.ranges import Chunks
from ..format.discover import find_signature
from ..format.manifest import MANIFEST_NAME, SIGNATURE_NAME, Asset, Manifest, Shard
from ..publish import cannot_write
from ..sources.folder import FolderSource
from ..sources.source import ReportProgress, Source
from .flock import is_at, try_lock
from .stored import allocated_bytes, sync_files

MARK_NAME = ".pilotflame.pull"
DIGESTS_NAME = ".pilotflame.digests"
"""The file with the digests that a download has computed so far, if there is no manifest beside the weights."""
_MARK_BYTES = 64
_ELSEWHERE = "Name another folder, or overwrite what is there with --force (force=True)."


def download(
    manifest: Manifest,
    source: Source,
    folder: Path,
    *,
    force: bool = False,
    progress: ReportProgress | None = None,
    connections: int | None = None,
    part_bytes: int | None = None,
) -> FetchStats:
    """Download the snapshot into `folder`, and block until it is complete. Chunks that the folder has are kept.

    Raise CacheError, without changing any file, if the folder holds the manifest of another snapshot, or if a link, or
    a file with another size or other bytes, has the name of one of this snapshot's files. With `force`, such files are
    removed instead. With or without `force`, damaged files of this snapshot are repaired. Raise SnapshotCorrupt for an
    asset that differs from the manifest, and the errors of `fetch`.
    """
    if isinstance(source, FolderSource) and Path(source.url).resolve() == folder.resolve():
        raise CacheError(f"{folder} is where the snapshot is.", remedy="Name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _mark(folder) as mark, ExitStack() as opened:
            work = _Download(manifest, folder, mark, force=force)
            work.accept(opened)
            fetch_assets(manifest, source, folder)
            if not work.arrival.complete:
                (folder / MANIFEST_NAME).unlink(missing_ok=True)
            stats = fetch(
                work.manifest, source, work.targets, work.arrival,
                connections=connections, part_bytes=part_bytes, progress=progress,
            )  # fmt: skip
            # Sync before the manifest is written, because a folder with a manifest must be complete.
            sync_files(folder, manifest)
            if (signature := find_signature(source, manifest)) is not None:
                FolderSource(folder).put(SIGNATURE_NAME, signature)
            work.described().write(folder / MANIFEST_NAME)
            (folder / DIGESTS_NAME).unlink(missing_ok=True)
            (folder / MARK_NAME).unlink()
            return stats
    except OSError as error:
        raise cannot_write(Path(error.filename or folder), error) from error


class _Download:
    """The files of one download. No other download writes to the folder, because the folder's mark is locked."""

    def __init__(self, manifest: Manifest, folder: Path, mark: int, *, force: bool) -> None:
        """`mark` is the descriptor of the mark, which may hold the digest of an interrupted download."""
        self._folder, self._mark, self._force = folder, mark, force
        self._present = _present_manifest(folder, manifest, force=force)
        # If `manifest` has no order of first touch, keep the order in the folder's manifest.
        touched = self._present.first_touch if self._present and not manifest.first_touch else ()
        self.manifest = manifest.model_copy(update={"first_touch": touched}) if touched else manifest
        self._known = self._present is not None or os.pread(mark, _MARK_BYTES, 0) == manifest.digest.encode()
        self.targets: list[ShardTarget] = []
        self.arrival = Arrival(manifest)

    def described(self) -> Manifest:
        """Return the manifest for the folder. Call it when all chunks have landed."""
        if self.manifest.has_digests:
            return self.manifest.published()
        return self.manifest.with_chunks(self.arrival.chunks.digests).published()

    def accept(self, opened: ExitStack) -> None:
        """Open the shards' files at full size, and record as landed the chunks that they hold.

        Until `opened` is closed, the files stay open, and a journal gets the digest of each chunk that lands. Raise
        CacheError if files in the folder may not be replaced, or if the disk has too little room. After a CacheError, no
        older file has been replaced or removed, and no new file is left.
        """
        learned = self._learned(opened)
        foreign = self._foreign_files()
        self._check_room(foreign)
        paths = [self._folder / shard.name for shard in self.manifest.shards]
        held = [path.is_file() and path.stat().st_size > 0 for path in paths]
        sure = self._known or self._force or not any(held)
        if sure:
            self._write_mark()
        if self._force:
            for path in foreign if self._present else (*foreign, self._folder / MANIFEST_NAME):
                path.unlink(missing_ok=True)
        with ExitStack() as undo:
            for shard in self.manifest.shards:
                self._open(shard, opened, undo)
            land_existing(self.manifest, self.targets, self.arrival, threading.Event(), learned)
            if not sure:
                self._check_held(held)
                self._write_mark()
            undo.pop_all()

    def _learned(self, opened: ExitStack) -> Sequence[str] | None:
        """Return the digests that are known from earlier downloads. None if the manifest has digests."""
        if self.manifest.has_digests:
            return None
        learned = opened.enter_context(learned_digests(self._folder / DIGESTS_NAME, self.arrival))
        return learned if self._present is None else Chunks(self._present).digests

    def _write_mark(self) -> None:
        digest = self.manifest.digest.encode()
        if os.pread(self._mark, _MARK_BYTES, 0) != digest:
            os.ftruncate(self._mark, 0)
            os.pwrite(self._mark, digest, 0)
            os.fsync(self._mark)

    def _foreign_files(self) -> Sequence[Path]:
        """Return the paths of foreign files that have names of this snapshot's files, and so must be removed first.

        Raise CacheError if a link leads out of the folder or, without `force`, if there are foreign files.
        """
        found = []
        for file in self.manifest.files:
            path = self._folder / file.name
            if not path.parent.resolve().is_relative_to(self._folder.resolve()):
                raise CacheError(f"{path} leads out of the folder by a link.", remedy="Remove the link.")
            if (fault := self._fault(path, file)) and not self._force:
                raise CacheError(f"{path} is not the snapshot's: {fault}.", remedy=_ELSEWHERE)
            # With `force`, also remove a file of the right size if no download of this snapshot began here. The file
            # may belong to a finetune that a process has mapped, and writing to it would change that process's weights.
            if fault or (self._force and not self._known and path.is_file()):
                found.append(path)
        return found

    def _fault(self, path: Path, file: Shard | Asset) -> str:
        try:
            status = path.lstat()
        except FileNotFoundError:
            return ""
        if not stat.S_ISREG(status.st_mode):
            return "it is no regular file"
        # Accept an empty file: a process may have been killed after it created the file and before it set the size.
        if status.st_size == 0 or self._known:
            return ""
        if status.st_size != file.size_bytes:
            return f"it has {status.st_size} bytes, {file.size_bytes} expected"
        # The bytes of shards are compared later, chunk by chunk (see `_check_held`).
        differs = isinstance(file, Asset) and not holds(path, file, self.manifest.digest_algorithm)
        return "it has other bytes" if differs else ""

    def _check_room(self, foreign: Sequence[Path]) -> None:
        needed_bytes = 0
        for file in self.manifest.files:
            path = self._folder / file.name
            missing_bytes = file.size_bytes - (allocated_bytes(path.lstat()) if path.is_file() else 0)
            # Removing a foreign file frees its bytes, so this difference may be negative.
            needed_bytes += missing_bytes if path in foreign else max(0, missing_bytes)
        if needed_bytes > (free_bytes := shutil.disk_usage(self._folder).free):
            fault = f"{self._folder} has {free_bytes} bytes free, and {needed_bytes} are still to come."
            raise CacheError(fault, remedy="Make room, or name a folder on another disk.")

    def _open(self, shard: Shard, opened: ExitStack, undo: ExitStack) -> None:
        path = self._folder / shard.name
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        opened.callback(os.close, descriptor)
        if new:
            undo.callback(path.unlink, missing_ok=True)
        if os.fstat(descriptor).st_size != shard.size_bytes:
            os.ftruncate(descriptor, shard.size_bytes)
        self.targets.append(ShardTarget(str(path), descriptor, self.manifest.digest_algorithm))

    def _check_held(self, held: Sequence[bool]) -> None:
        """Raise CacheError if a file that existed before the download differs from the snapshot in any chunk.

        Such a file may belong to a finetune. `held` has True for each shard whose file had bytes before.
        """
        for index, shard in enumerate(self.manifest.shards):
            chunks = self.arrival.chunks.covering(index, 0, shard.size_bytes)
            if held[index] and shard.size_bytes and not self.arrival.has(*chunks):
                path = self._folder / shard.name
                raise CacheError(f"{path} is not the snapshot's: it has other bytes.", remedy=_ELSEWHERE)


@contextmanager
def _mark(folder: Path) -> Iterator[int]:
    """Open and lock the folder's mark, and yield its descriptor. Raise CacheError if another download has locked it."""
    path = folder / MARK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        if not try_lock(descriptor, exclusive=True) or not is_at(descriptor, path):
            fault = f"Another pull into {folder} is running."
            raise CacheError(fault, remedy="Wait for it, or name another folder.")
        try:
            yield descriptor
        except BaseException:
            # Remove only an empty mark. It shows that the download was refused before it changed any file.
            if not os.fstat(descriptor).st_size:
                path.unlink(missing_ok=True)
            raise
    finally:
        os.close(descriptor)


def _is_made_of(found: Manifest, manifest: Manifest) -> bool:
    """Return True if an earlier download made the manifest `found` for the same files that `manifest` describes."""
    observed = manifest.observed
    made = observed is not None and found.provenance.source == observed.provenance.source
    return made and found.model_copy(update={"observed": observed}).digest == manifest.digest


def _present_manifest(folder: Path, manifest: Manifest, *, force: bool) -> Manifest | None:
    """Return the folder's manifest, None if there is no manifest.

    If it is damaged or describes other files than `manifest`, return None with `force`, and raise CacheError without.
    """
    if not os.path.lexists(folder / MANIFEST_NAME):
        return None
    try:
        found = Manifest.read(folder / MANIFEST_NAME)
        if found.digest == manifest.digest or _is_made_of(found, manifest):
            return found
        other = found.digest[:16]
    except ManifestError:
        other = "one that cannot be read"
    if force:
        return None
    fault = f"{folder} holds the manifest of another snapshot ({other})."
    raise CacheError(fault, remedy=_ELSEWHERE)
