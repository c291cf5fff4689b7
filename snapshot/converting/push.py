"""Copies (pushes) a snapshot to a destination. The manifest is sent last: a reader that finds it finds all files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import (
    ManifestError,
    SnapshotChanged,
    SnapshotError,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
)
from ..format.discover import find_signature
from ..format.layout import some
from ..format.manifest import MANIFEST_NAME, SIGNATURE_NAME, Asset, Manifest, Shard, read_manifest
from ..format.verify import verify
from ..sources.folder import FolderSource
from ..sources.source import ByteCounter, ReportProgress, Source, Writable, WrittenWhole

_FORCE = "Push to another prefix, or overwrite it with --force."
# Replaces the manifest while files are overwritten. This text is not a valid manifest, so readers refuse the snapshot.
_BROKEN_OFF = b'{"incomplete": "A push overwrites these files. If it broke off, push again with --force."}\n'


@dataclass(frozen=True, slots=True)
class Pushed:
    """How many files and bytes a push sent, and how many the destination already had. The manifest is not counted."""

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
    progress: ReportProgress | None = None,
) -> Pushed:
    """Copy the snapshot in `folder` to `destination`: shards, assets, the signature if there is one, then the manifest.

    Verify the files first, unless the caller has verified them and passes `verified`. Do not send a file that
    the destination already has: the destination's manifest lists the file with the same digests, and the file has the
    right size there.

    If the destination's manifest is of another snapshot or cannot be read, it is overwritten only with `force`,
    because processes that read the old snapshot then fail. During such a push, the destination has no valid manifest.

    A destination that is WrittenWhole keeps files with the same bytes, even of another snapshot, and changes its files all at
    once. There, `force` is needed if any file differs. Without `force` and without a signature in `folder`, the destination's
    signature stays.

    Raise SnapshotCorrupt if a file does not match `manifest`, SnapshotError if `force` is needed or `destination` is
    neither Writable nor WrittenWhole, and SourceError or CacheError if the destination cannot be read or written.
    """
    if not isinstance(destination, Writable | WrittenWhole):
        fault = f"{destination.url} cannot be written to."
        raise SnapshotError(fault, remedy="Push to s3://, to oci:// or to a folder.")
    if not verified:
        verify(folder, manifest)
    if isinstance(destination, WrittenWhole):
        return _push_whole(folder, manifest, destination, force=force, progress=progress)
    wanted = {file.name for file in manifest.files} | {MANIFEST_NAME}
    sizes = {name: destination.stat(name).size_bytes for name in destination.names() if name in wanted}
    existing = _existing_manifest(destination, force=force) if MANIFEST_NAME in sizes else None
    if existing is not None and existing.digest != manifest.digest and not force:
        fault = f"{destination.url} holds another snapshot, {existing.digest[:12]}."
        raise SnapshotError(fault, remedy=_FORCE)
    known: set[Shard | Asset] = set(existing.assets if existing else ())
    # A shard's digests belong to its chunks, so only manifests with the same chunk size are comparable.
    if existing is not None and existing.chunk_bytes == manifest.chunk_bytes:
        known.update(existing.shards)
    missing = [
        file for file in manifest.files if file not in known or sizes.get(file.name) != file.size_bytes
    ]
    if existing is not None and existing.digest != manifest.digest and _replaces(missing, existing):
        # This push makes the existing manifest wrong. If it breaks off, the next push must not trust that manifest.
        destination.put(MANIFEST_NAME, _BROKEN_OFF)
    _send(folder, missing, destination, progress)
    if (signature := find_signature(FolderSource(folder), manifest)) is not None:
        destination.put(SIGNATURE_NAME, signature)
    if existing is None or missing or existing.to_json() != manifest.to_json():
        destination.put(MANIFEST_NAME, manifest.to_json())
    sent_bytes = sum(file.size_bytes for file in missing)
    kept_bytes = manifest.total_bytes + manifest.assets_bytes - sent_bytes
    return Pushed(len(missing), sent_bytes, len(manifest.files) - len(missing), kept_bytes)


def _push_whole(
    folder: Path,
    manifest: Manifest,
    destination: WrittenWhole,
    *,
    force: bool,
    progress: ReportProgress | None,
) -> Pushed:
    """Write a destination whose files change all at once. Readers see the old files or the new files."""
    destination.begin_writing()
    signature = find_signature(FolderSource(folder), manifest)
    if not force:
        signature = _check_same(destination, manifest, signature)
    files: dict[str, Path | bytes] = {file.name: folder / file.name for file in manifest.files}
    if signature is not None:
        files[SIGNATURE_NAME] = signature
    counter = ByteCounter(manifest.total_bytes + manifest.assets_bytes, progress)
    kept = destination.put_all({**files, MANIFEST_NAME: manifest.to_json()}, counter.add)
    there = [file for file in manifest.files if file.name in kept]
    kept_bytes = sum(file.size_bytes for file in there)
    sent_bytes = manifest.total_bytes + manifest.assets_bytes - kept_bytes
    return Pushed(len(manifest.files) - len(there), sent_bytes, len(there), kept_bytes)


def _check_same(destination: WrittenWhole, manifest: Manifest, signature: bytes | None) -> bytes | None:
    """Return the signature to send: `signature` or, if it is None, the signature of the same snapshot at the destination.

    Raise SnapshotError if the destination holds anything but this snapshot with this signature.
    """
    try:
        existing = read_manifest(destination) if MANIFEST_NAME in destination.names() else None
    except SourceMissing:
        return signature
    except (SourceDenied, SourceUnavailable):
        raise
    except (SourceError, ManifestError):
        existing = None
    if existing is None:
        what = "something else"
    elif existing.digest != manifest.digest:
        what = f"another snapshot, {existing.digest[:12]}"
    else:
        there = find_signature(destination, existing)
        signature = there if signature is None else signature
        held = {name: destination.stat(name).size_bytes for name in destination.names()}
        wanted = {file.name: file.size_bytes for file in manifest.files}
        differing = _contents(held, existing, there) ^ _contents(wanted, manifest, signature)
        if not differing:
            return signature
        what = f"this snapshot with other files ({some(sorted({name for name, _ in differing}), 3)})"
    raise SnapshotError(
        f"{destination.url} holds {what}.", remedy="Push to another tag, or move it with --force."
    )


def _contents(
    sizes: Mapping[str, int], manifest: Manifest, signature: bytes | None
) -> set[tuple[str, int | bytes]]:
    """Return the names of a snapshot's files with their sizes. The manifest and the signature have their bytes instead."""
    files: dict[str, int | bytes] = {**sizes, MANIFEST_NAME: manifest.to_json()}
    if signature is not None:
        files[SIGNATURE_NAME] = signature
    return set(files.items())


def _replaces(sent: list[Shard | Asset], existing: Manifest) -> bool:
    names = {file.name for file in existing.files}
    return any(file.name in names for file in sent)


def _existing_manifest(destination: Source, *, force: bool) -> Manifest | None:
    try:
        return read_manifest(destination)
    except ManifestError as error:
        if force:
            return None
        fault = f"{destination.url} holds a manifest that cannot be read: {error.message}"
        raise SnapshotError(fault, remedy=_FORCE) from error


def _send(
    folder: Path, files: list[Shard | Asset], destination: Writable, progress: ReportProgress | None
) -> None:
    """Store the files at the destination."""
    source, sent = FolderSource(folder), ByteCounter(sum(file.size_bytes for file in files), progress)
    for file in files:
        if source.stat(file.name).size_bytes != file.size_bytes:
            fault = f"{file.name} in {folder} does not have its {file.size_bytes} bytes any more."
            raise SnapshotChanged(fault, remedy="Create the manifest again, or fetch the file again.")
        destination.put(file.name, folder / file.name, sent.add)
        if destination.stat(file.name).size_bytes != file.size_bytes:
            fault = f"{file.name} in {destination.url} does not have the bytes that were sent."
            raise SnapshotChanged(fault, remedy="Check that nothing else writes there, and push again.")
