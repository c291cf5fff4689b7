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


Fingerprint = tuple[FileFingerprint, ...]
"""All shards' files, in the manifest's order."""


def take_fingerprint(root: Path, manifest: Manifest) -> Fingerprint:
    """Return the fingerprint of the files under folder `root`; call it before verifying them."""
    source = FolderSource(root)
    files = []
    for shard in manifest.shards:
        descriptor = source.open(shard.name)
        try:
            files.append(_fingerprint_of(descriptor))
        finally:
            os.close(descriptor)
    return tuple(files)


def check_fingerprint(descriptor: int, name: str, verified: FileFingerprint) -> None:
    """Raise SnapshotChanged unless the open file is the verified one."""
    found = _fingerprint_of(descriptor)
    if found != verified:
        raise SnapshotChanged(
            f"Shard {name} is not the file that was verified: {_difference(verified, found)}.",
            remedy="Verify the snapshot again, and publish new weights under a new name.",
        )


def _fingerprint_of(descriptor: int) -> FileFingerprint:
    status = os.fstat(descriptor)
    return FileFingerprint(status.st_size, status.st_mtime_ns, status.st_ino)


def _difference(verified: FileFingerprint, found: FileFingerprint) -> str:
    if verified.size_bytes != found.size_bytes:
        return f"it has {found.size_bytes} bytes, {verified.size_bytes} expected"
    return "it was replaced" if verified.inode != found.inode else "it was written to"
