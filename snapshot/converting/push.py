"""Copies (pushes) a snapshot to a destination. The manifest is sent last: if it is there, all files are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import ManifestError, SnapshotChanged, SnapshotError
from ..format.manifest import MANIFEST_NAME, Asset, Manifest, Shard, read_manifest
from ..format.verify import verify
from ..sources.folder import FolderSource
from ..sources.source import ByteCounter, Progress, Source, Writable

_FORCE = "Push to another prefix, or overwrite it with --force."


@dataclass(frozen=True, slots=True)
class Pushed:
    """How many files and bytes a push sent, and how many were already there. The manifest is not counted."""

    sent_files: int
    sent_bytes: int
    kept_files: int
    kept_bytes: int


def push(
    folder: Path,
    manifest: Manifest,
    destination: Source,
    *,
    force: bool = False,
    verified: bool = False,
    progress: Progress | None = None,
) -> Pushed:
    """Copy the snapshot in `folder` to `destination`: shards, assets, then the manifest.

    Verifies the files first, unless the caller has done so and passes `verified`. Does not send a file that
    the destination already has: its manifest lists the file with the same digests, and the file has the right
    size there. If the destination's manifest is of another snapshot or cannot be read, it is overwritten only
    with `force`, because processes that read that snapshot then fail. Raises SnapshotCorrupt if a file does
    not match `manifest`, SnapshotError if `force` is needed or `destination` is not Writable, and SourceError
    or CacheError if the destination cannot be read or written.
    """
    if not isinstance(destination, Writable):
        fault = f"{destination.url} cannot be written to."
        raise SnapshotError(fault, remedy="Push to s3:// or to a folder.")
    if not verified:
        verify(folder, manifest)
    wanted = {file.name for file in manifest.files} | {MANIFEST_NAME}
    sizes = {name: destination.stat(name).size_bytes for name in destination.names() if name in wanted}
    existing = _existing_manifest(destination, force=force) if MANIFEST_NAME in sizes else None
    if existing is not None and existing.digest != manifest.digest and not force:
        fault = f"{destination.url} holds another snapshot, {existing.digest[:12]}."
        raise SnapshotError(fault, remedy=_FORCE)
    known: set[Shard | Asset] = set(existing.assets if existing else ())
    # Each digest of a shard is that of one chunk, so both manifests must have the same chunk size.
    if existing is not None and existing.chunk_bytes == manifest.chunk_bytes:
        known.update(existing.shards)
    sent = [file for file in manifest.files if file not in known or sizes.get(file.name) != file.size_bytes]
    _send(folder, sent, destination, progress)
    if existing is None or sent or existing.to_json() != manifest.to_json():
        destination.put(MANIFEST_NAME, manifest.to_json())
    sent_bytes = sum(file.size_bytes for file in sent)
    all_bytes = manifest.total_bytes + manifest.assets_bytes
    return Pushed(len(sent), sent_bytes, len(manifest.files) - len(sent), all_bytes - sent_bytes)


def _existing_manifest(destination: Source, *, force: bool) -> Manifest | None:
    try:
        return read_manifest(destination)
    except ManifestError as error:
        if force:
            return None
        fault = f"{destination.url} holds a manifest that cannot be read: {error.message}"
        raise SnapshotError(fault, remedy=_FORCE) from error


def _send(folder: Path, files: list[Shard | Asset], destination: Writable, progress: Progress | None) -> None:
    source, sent = FolderSource(folder), ByteCounter(sum(file.size_bytes for file in files), progress)
    for file in files:
        if source.stat(file.name).size_bytes != file.size_bytes:
            fault = f"{file.name} in {folder} does not have its {file.size_bytes} bytes any more."
            raise SnapshotChanged(fault, remedy="Create the manifest again, or fetch the file again.")
        destination.put(file.name, folder / file.name, sent.add)
        if destination.stat(file.name).size_bytes != file.size_bytes:
            fault = f"{file.name} in {destination.url} does not have the bytes that were sent."
            raise SnapshotChanged(fault, remedy="Check that nothing else writes there, and push again.")
