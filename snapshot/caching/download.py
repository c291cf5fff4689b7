"""Downloads: a snapshot into a folder of the user's own, whole or resumable, and never over what is somebody else's.

While it is under way the folder holds `.pilotflame.pull`: locked by who pulls, and in it the digest of what is pulled, so
that whoever comes after a crash knows that half a file is a beginning and not somebody's weights. The manifest is written last.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...errors import CacheError, Cancelled, ManifestError
from ..fetching.arrival import Arrival
from ..fetching.fetch import FetchStats, fetch
from ..fetching.target import ShardTarget
from ..format.manifest import MANIFEST_NAME, Manifest, Shard
from ..publish import sync
from ..sources.folder import FolderSource
from ..sources.source import Progress, Source
from .assets import bring_assets
from .flock import is_at, try_lock
from .resume import land_what_is_there
from .stored import allocated_bytes, file_sizes

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
    learned: Path | None = None,
) -> FetchStats:
    """Bring the snapshot into `folder`; what is there and fits its digests is kept, whoever put it there.

    Blocks. CacheError, with nothing changed, if the folder holds another snapshot's manifest, or files of the snapshot's
    names that are none of its: links, of another size, or of its size and not its bytes; `force` removes those. Else as
    `fetch`, and SnapshotCorrupt for an asset. Broken off anywhere, even by kill -9, it is resumed by calling it again.
    """
    stopped = cancelled or threading.Event()
    _check_apart(source, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder) as mark, ExitStack() as opened:
            work = _Download(manifest, folder, mark, force=force)
            work.accept(opened, stopped)
            bring_assets(manifest, source, folder)
            stats = work.fetch(source, progress, stopped, connections, part_bytes, learned)
            work.publish()
            (folder / MARK_NAME).unlink()
            return stats
    except OSError as error:
        raise CacheError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}.",
            remedy="Make room, mend the folder's permissions, or name another one.",
        ) from error


class _Mark:
    """The file that says what is being pulled here."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.digest = os.pread(descriptor, _MARK_BYTES, 0).decode("ascii", "replace")
        """What was being pulled here before; empty if nothing was."""

    def write(self, digest: str) -> None:
        if digest != self.digest:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, digest.encode(), 0)
            os.fsync(self.descriptor)


class _Download:
    """One download, alone in its folder."""

    def __init__(self, manifest: Manifest, folder: Path, mark: _Mark, *, force: bool) -> None:
        self._folder = folder
        self._mark = mark
        self._force = force
        self._present, self._other = _present(folder, manifest)
        # Recorded here, for a snapshot that was published without: no reason to forget it.
        touched = self._present.first_touch if self._present and not manifest.first_touch else ()
        self._manifest = manifest.model_copy(update={"first_touch": touched}) if touched else manifest
        self._known = self._present is not None or mark.digest == manifest.digest
        self._targets: list[ShardTarget] = []
        self._arrival = Arrival(manifest)

    def accept(self, opened: ExitStack, cancelled: threading.Event) -> None:
        """Open the files at full size and land what fits. Until nothing can be refused any more, nothing is changed."""
        if self._other and not self._force:
            raise CacheError(
                f"{self._folder} holds the manifest of another snapshot ({self._other}).", remedy=_ELSEWHERE
            )
        foreign = self._foreign_files()
        self._check_room(foreign)
        paths = [self._folder / shard.name for shard in self._manifest.shards]
        sure = self._known or self._force or not any(path.exists() for path in paths)
        if sure:
            self._mark.write(self._manifest.digest)
        if self._force:
            for path in (*foreign, *([self._folder / MANIFEST_NAME] if self._other else [])):
                path.unlink()
        with ExitStack() as undo:
            held = [self._open(shard, opened, undo) for shard in self._manifest.shards]
            land_what_is_there(self._manifest, self._targets, self._arrival, cancelled)
            if not sure:
                self._check_held(held, cancelled)
                self._mark.write(self._manifest.digest)
            undo.pop_all()

    def fetch(
        self,
        source: Source,
        progress: Progress | None,
        cancelled: threading.Event,
        connections: int | None,
        part_bytes: int | None,
        learned: Path | None,
    ) -> FetchStats:
        if not self._arrival.complete and self._present is not None:
            (self._folder / MANIFEST_NAME).unlink()  # a folder that has one is whole
        if progress is not None:
            progress(self._landed_bytes(), self._manifest.total_bytes)
        return fetch(
            self._manifest, source, self._targets, self._arrival,
            progress=progress, cancelled=cancelled, connections=connections, part_bytes=part_bytes, learned=learned,
        )  # fmt: skip

    def publish(self) -> None:
        """All is verified: say so, once the disk has it."""
        paths = [self._folder / name for name in file_sizes(self._manifest)]
        for path in paths:
            sync(path)
        inside = {above for path in paths for above in path.parents if above.is_relative_to(self._folder)}
        for above in inside:
            sync(above)
        self._manifest.write(self._folder / MANIFEST_NAME)

    def _foreign_files(self) -> Sequence[Path]:
        """What has a name of the snapshot's and cannot be a beginning of it."""
        found = []
        for name, size_bytes in file_sizes(self._manifest).items():
            path = self._folder / name
            if not path.parent.resolve().is_relative_to(self._folder.resolve()):
                raise CacheError(f"{path} leads out of the folder by a link.", remedy="Remove the link.")
            if (fault := self._fault(path, size_bytes)) and not self._force:
                raise CacheError(f"{path} is not the snapshot's: {fault}.", remedy=_ELSEWHERE)
            # Never into an inode that another may have mapped: a finetune's file has the same size.
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
        # An empty file is what a crash leaves between making one and giving it its size.
        if status.st_size in {0, size_bytes} or self._known:
            return ""
        return f"it has {status.st_size} bytes, {size_bytes} expected"

    def _check_room(self, foreign: Sequence[Path]) -> None:
        needed_bytes = 0
        for name, size_bytes in file_sizes(self._manifest).items():
            path = self._folder / name
            held_bytes = allocated_bytes(path.lstat()) if path.is_file() else 0
            needed_bytes += -held_bytes if path in foreign else 0
            needed_bytes += max(0, size_bytes - (0 if path in foreign else held_bytes))
        status = os.statvfs(self._folder)
        if needed_bytes > (free_bytes := status.f_bavail * status.f_frsize):
            raise CacheError(
                f"{self._folder} has {free_bytes} bytes free, and {needed_bytes} are still to come.",
                remedy="Make room, or name a folder on another disk.",
            )

    def _open(self, shard: Shard, opened: ExitStack, undo: ExitStack) -> bool:
        """Open one shard's file at full size; whether there was something in it."""
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
        self._targets.append(ShardTarget(str(path), descriptor))
        return held_bytes > 0

    def _check_held(self, held: Sequence[bool], cancelled: threading.Event) -> None:
        """Refuse files that nobody began here and that are not the snapshot's to the last byte: a finetune's, say."""
        if cancelled.is_set():
            raise Cancelled("The download was cancelled.")
        for index, shard in enumerate(self._manifest.shards):
            chunks = range(self._arrival.first[index], self._arrival.first[index + 1])
            if held[index] and chunks and not all(self._arrival.landed(chunk) for chunk in chunks):
                raise CacheError(
                    f"{self._folder / shard.name} is not the snapshot's: of its size, and not all of it fits.",
                    remedy=_ELSEWHERE,
                )

    def _landed_bytes(self) -> int:
        return sum(
            min(self._manifest.chunk_bytes, shard.size_bytes - chunk * self._manifest.chunk_bytes)
            for index, shard in enumerate(self._manifest.shards)
            for chunk in range(len(shard.chunks))
            if self._arrival.landed(self._arrival.first[index] + chunk)
        )


@contextmanager
def _alone(folder: Path) -> Iterator[_Mark]:
    """The folder's mark, locked: nobody else pulls into it meanwhile."""
    path = folder / MARK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        if not try_lock(descriptor, exclusive=True) or not is_at(descriptor, path):
            raise CacheError(
                f"Somebody else is pulling into {folder}.", remedy="Wait for that, or name another folder."
            )
        mark = _Mark(descriptor)
        try:
            yield mark
        except BaseException:
            # Refused before anything was begun: as it was.
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


def _check_apart(source: Source, folder: Path) -> None:
    if isinstance(source, FolderSource) and Path(source.url).resolve() == folder.resolve():
        raise CacheError(f"{folder} is where the snapshot is.", remedy="Name another folder.")
