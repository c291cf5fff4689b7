"""Describes the snapshots in a tier, as found in its files, and syncs files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..format.manifest import MANIFEST_NAME, Manifest
from ..publish import sync
from .flock import try_lock

MOUNTED = "mounted"
"""The file of a snapshot's folder that is locked shared while containers have the folder mounted."""

REUSED = "reused"
"""The file of a snapshot's folder that exists while the shards may hold bytes of another snapshot."""


DIGESTS = "digests"
"""The file of a snapshot's folder with the digests computed so far, if there was no manifest beside the weights."""


PART = "part"
"""The file of a snapshot's folder with the number of needed bytes, if only a part of the snapshot is needed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot in a tier, complete or not. `ready` is True if the snapshot is published.

    `size_bytes` counts the needed bytes of the shards, and the assets. `allocated_bytes` is what the file
    system has allocated for these files, without holes.
    `used_s` is the time when the snapshot was last opened, in seconds since the epoch.
    """

    digest: str
    folder: Path
    size_bytes: int
    allocated_bytes: int
    used_s: float
    ready: bool

    @property
    def outstanding_bytes(self) -> int:
        """How many bytes the file system must still allocate until the snapshot is complete."""
        return 0 if self.ready else max(0, self.size_bytes - self.allocated_bytes)


def allocated_bytes(status: os.stat_result) -> int:
    """Return how many bytes the file system has allocated for a file. Holes do not count."""
    # The unit of st_blocks is always 512 bytes, even if the file system's own blocks are larger.
    return status.st_blocks * 512


def read_stored(folder: Path) -> Stored:
    """Describe the snapshot in `folder` by its files. Raise FileNotFoundError if there is no snapshot."""
    sizes = list(_sizes(folder / "files"))
    return Stored(
        digest=folder.name,
        folder=folder,
        size_bytes=int(min(sum(status.st_size for status in sizes), _needed_bytes(folder))),
        allocated_bytes=sum(allocated_bytes(status) for status in sizes),
        used_s=folder.stat().st_mtime,
        ready=is_published(folder),
    )


def list_stored(root: Path) -> list[Stored]:
    """Return the snapshots in folder `root`, complete or not, with the least recently used first."""
    try:
        folders = [Path(entry) for entry in os.scandir(root)]
    except (FileNotFoundError, PermissionError):
        return []
    found = []
    for folder in folders:
        # Another process may evict the snapshot meanwhile.
        with suppress(FileNotFoundError):
            if (folder / "files").is_dir():
                found.append(read_stored(folder))
    return sorted(found, key=lambda stored: stored.used_s)


def is_published(folder: Path) -> bool:
    """Return True if the snapshot in `folder` is published, and so complete."""
    return (folder / "files" / MANIFEST_NAME).is_file()


def _needed_bytes(folder: Path) -> float:
    """Return how many bytes of the snapshot in `folder` are needed. Infinity if all bytes are needed."""
    try:
        return int((folder / PART).read_text("ascii"))
    except (OSError, ValueError):
        return math.inf


def _sizes(folder: Path) -> Iterator[os.stat_result]:
    # A fetch waits for this function, for every snapshot of its tier. Path.rglob would take four times as long.
    with os.scandir(folder) as entries:
        for entry in entries:
            # A process may rename the temporary file of an asset meanwhile.
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry))
                elif entry.name != MANIFEST_NAME and entry.is_file(follow_symlinks=False):
                    yield entry.stat(follow_symlinks=False)


def is_mounted(folder: Path) -> bool:
    """Return True if a snapshot's folder is kept in place for a container that has it mounted."""
    try:
        descriptor = os.open(folder / MOUNTED, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, exclusive=True)
    finally:
        os.close(descriptor)


def is_whole(files: Path, manifest: Manifest) -> bool:
    """Return True if folder `files` holds a manifest, and all files of `manifest` at full size."""
    try:
        return (files / MANIFEST_NAME).is_file() and all(
            (files / file.name).stat().st_size == file.size_bytes for file in manifest.files
        )
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync_files(files: Path, manifest: Manifest) -> None:
    """Sync the shards and assets in folder `files`, and the folders that hold them, to the disk."""
    paths = [files / file.name for file in manifest.files]
    folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(files)}
    for path in (*paths, *folders):
        sync(path)
