"""Opens the shards of a snapshot in a folder of this node, and refuses a file whose bytes differ from the manifest.

A file has a version (`file_version`), which changes when anything writes to the file or replaces it. A file is read and
compared with the digests once for each version: a deploy stores the versions that it has compared. So an unchanged file costs
one system call. A copy or a restored backup has a new version, so it is read once more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ...errors import SnapshotChanged, SnapshotError, SourceError
from ..sources.folder import FolderSource, read_at
from .manifest import Manifest, Shard
from .verify import chunk_fault

REMEDY = "Deploy again to use the new file, or put the deployed file back."
# The times of files come from a clock that ticks every 1 to 10 ms. A second write within a tick may not change them.
_TICK_NS = 20_000_000
# Some file systems store times in whole seconds, or in units of two seconds.
_SECOND_NS = 1_000_000_000


def file_version(status: os.stat_result) -> str:
    """Return the version of a file. "" if the file has changed so recently that another write may not change its times.

    After a write, a program can reset the time of the last write (mtime), but not the time of the last change (ctime). So
    the version includes the ctime. But adding or removing a hard link changes the ctime too, although the bytes stay. So the
    version of a file with several hard links has no ctime.
    """
    named_once = status.st_nlink == 1
    changed_ns = status.st_ctime_ns if named_once else status.st_mtime_ns
    tick_ns = _TICK_NS if changed_ns % _SECOND_NS else 2 * _SECOND_NS
    # Accept a time far in the future: it comes from another clock, such as the clock of a file server.
    if abs(time.time_ns() - changed_ns) < tick_ns:
        return ""
    version = f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
    return f"{version}-{status.st_ctime_ns}" if named_once else version


class ComparedShards:
    """The shards of a snapshot in folder `root`. Thread-safe. Forked processes inherit the versions that were compared."""

    def __init__(self, root: Path, manifest: Manifest, versions: Mapping[str, str]) -> None:
        """`versions` has, by the names of shards, the versions of files that were compared with `manifest` before."""
        self._source, self._manifest = FolderSource(root), manifest
        self._numbers = {shard.name: number for number, shard in enumerate(manifest.shards)}
        self._paths = {name: root / name for name in self._numbers}
        self.versions = dict(versions)

    def open(self, name: str) -> int:
        """Open a shard and return its descriptor. Raise SnapshotChanged if the manifest describes other bytes."""
        try:
            descriptor = self._source.open(name)
        except SourceError as error:
            raise SnapshotChanged(error.message, remedy=REMEDY, details={"shard": name}) from error
        try:
            self.compare(name, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def compare(self, name: str, descriptor: int) -> None:
        """Raise SnapshotChanged if an open shard has other bytes than the manifest. Read the file only if its version is new."""
        version = file_version(os.fstat(descriptor))
        if self._knows(name, version):
            return
        self._read(self._numbers[name], descriptor)
        # Store the version from before the read. If the file was written to meanwhile, its version is now another one, and
        # the next call reads the file again.
        self.versions[name] = version

    def check(self) -> None:
        """Compare the files that have the names of the shards now. Read only files with a new version. Raise SnapshotChanged."""
        for name, path in self._paths.items():
            try:
                version = file_version(path.stat())
            except OSError:
                version = ""
            if not self._knows(name, version):
                os.close(self.open(name))

    def _knows(self, name: str, version: str) -> bool:
        known = self.versions.get(name, "")
        return bool(version) and (version == known or known.startswith(f"{version}-"))

    def _read(self, number: int, descriptor: int) -> None:
        manifest, shard = self._manifest, self._manifest.shards[number]
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != shard.size_bytes:
            raise self._changed(shard, f"it has {size_bytes} bytes instead of {shard.size_bytes}")
        buffer = memoryview(bytearray(min(manifest.chunk_bytes, size_bytes)))
        for begin, end in manifest.needed_extents(number):
            for at in range(begin, end, manifest.chunk_bytes):
                view = buffer[: min(manifest.chunk_bytes, end - at)]
                read_at(descriptor, view, at)
                chunk = at // manifest.chunk_bytes
                if manifest.digest_algorithm.digest(view) != shard.chunks[chunk]:
                    raise self._changed(shard, chunk_fault(manifest, number, chunk))

    def _changed(self, shard: Shard, how: str) -> SnapshotChanged:
        fault = f"Shard {shard.name} of {self._source.url} was replaced or written to: {how}."
        return SnapshotChanged(fault, remedy=REMEDY, details={"shard": shard.name})


def truncated(root: Path, manifest_file: Path) -> str:
    """Return the path of the first shard that is shorter than the manifest says. "" if there is none, or a file is missing."""
    with suppress(OSError, SnapshotError):
        for shard in Manifest.read(manifest_file).shards:
            if (path := root / shard.name).stat().st_size < shard.size_bytes:
                return str(path)
    return ""
