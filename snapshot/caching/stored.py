"""What a tier's folders hold: snapshots, as their files say."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..format.manifest import MANIFEST_NAME, Manifest
from ..publish import sync


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot in a tier. `used_s`: when it was last opened, seconds since the epoch."""

    digest: str
    folder: Path
    size_bytes: int
    allocated_bytes: int
    used_s: float
    ready: bool

    @property
    def outstanding_bytes(self) -> int:
        """What the file system must still allocate for it."""
        return 0 if self.ready else max(0, self.size_bytes - self.allocated_bytes)


def allocated_bytes(status: os.stat_result) -> int:
    """What the file system has allocated for a file: without holes."""
    # The unit of st_blocks, whatever the file system's own blocks are.
    return status.st_blocks * 512


def read_stored(folder: Path) -> Stored:
    """Describe the snapshot whose folder is `folder`."""
    sizes = []
    for path in (folder / "files").rglob("*"):
        # An asset's temporary file may be renamed meanwhile.
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and path.name != MANIFEST_NAME:
                sizes.append(status)
    return Stored(
        digest=folder.name,
        folder=folder,
        size_bytes=sum(status.st_size for status in sizes),
        allocated_bytes=sum(allocated_bytes(status) for status in sizes),
        used_s=folder.stat().st_mtime,
        ready=(folder / "files" / MANIFEST_NAME).is_file(),
    )


def is_whole(files: Path, manifest: Manifest) -> bool:
    """Return True if a snapshot was published in folder `files`, and its files have their sizes."""
    try:
        return (files / MANIFEST_NAME).is_file() and all(
            (files / file.name).stat().st_size == file.size_bytes for file in manifest.files
        )
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync_files(files: Path, manifest: Manifest) -> None:
    """Sync the shards and assets in folder `files`, then `files` and the folders in it."""
    paths = [files / file.name for file in manifest.files]
    folders = {folder for path in paths for folder in path.parents if folder.is_relative_to(files)}
    for path in (*paths, *folders):
        sync(path)
