"""Which files a snapshot was verified as: cheap to compare when they are mapped."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...errors import SnapshotChanged
from ..format.manifest import Manifest
from ..sources.folder import FolderSource


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """One shard's file, as the file system knows it."""

    size_bytes: int
    mtime_ns: int
    inode: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All shards' files, in the manifest's order."""

    files: tuple[FileFingerprint, ...]


def pin(root: Path, manifest: Manifest) -> Fingerprint:
    """Note the files under folder `root` as they are now; call it before verifying them."""
    source = FolderSource(root)
    return Fingerprint(tuple(_file_pin(source, shard.name) for shard in manifest.shards))


def check_pin(descriptor: int, name: str, pinned: FileFingerprint) -> None:
    """SnapshotChanged unless the open file is the pinned one."""
    found = pin_of(descriptor)
    if found != pinned:
        raise SnapshotChanged(
            f"Shard {name} is not the file that was verified: {_difference(pinned, found)}.",
            remedy="Verify the snapshot again, and publish new weights under a new name.",
        )


def pin_of(descriptor: int) -> FileFingerprint:
    """The pin of an open file."""
    status = os.fstat(descriptor)
    return FileFingerprint(status.st_size, status.st_mtime_ns, status.st_ino)


def _file_pin(source: FolderSource, name: str) -> FileFingerprint:
    descriptor = source.open(name)
    try:
        return pin_of(descriptor)
    finally:
        os.close(descriptor)


def _difference(pinned: FileFingerprint, found: FileFingerprint) -> str:
    if pinned.size_bytes != found.size_bytes:
        return f"it has {found.size_bytes} bytes, {pinned.size_bytes} expected"
    return "it was replaced" if pinned.inode != found.inode else "it was written to"
