"""What is stored: snapshots in a tier's folders, as their files say."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..format.manifest import MANIFEST_NAME, Manifest

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot in a tier, as its files say. `used_s`: when it was last opened, seconds since the epoch."""

    digest: str
    folder: Path
    size_bytes: int
    allocated_bytes: int
    used_s: float
    ready: bool

    @property
    def outstanding_bytes(self) -> int:
        """What the file system will still have to give for it."""
        return 0 if self.ready else max(0, self.size_bytes - self.allocated_bytes)


def allocated_bytes(status: os.stat_result) -> int:
    """What the file system has given for a file: holes, and what was never written, are not in it."""
    return status.st_blocks * _BLOCK_BYTES


def look_at(folder: Path) -> Stored:
    """What lies in the snapshot's folder `folder`."""
    sizes = []
    for path in (folder / "files").rglob("*"):
        with suppress(FileNotFoundError):  # an asset under its temporary name, a moment ago
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


def needed_bytes(manifest: Manifest) -> int:
    """What a snapshot takes of a budget: shards and assets; not its manifest."""
    return sum(file_sizes(manifest).values())


def file_sizes(manifest: Manifest) -> dict[str, int]:
    """Name and bytes of every shard and asset."""
    sizes = {shard.name: shard.size_bytes for shard in manifest.shards}
    return sizes | {asset.name: asset.size_bytes for asset in manifest.assets}


def is_whole(files: Path, manifest: Manifest) -> bool:
    """Whether a snapshot was published in folder `files`, and its files have the sizes they should have."""
    try:
        return (files / MANIFEST_NAME).is_file() and all(
            (files / name).stat().st_size == size_bytes for name, size_bytes in file_sizes(manifest).items()
        )
    except (FileNotFoundError, NotADirectoryError):
        return False
