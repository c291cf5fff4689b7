"""Pushing: a snapshot's files to where others read them, the manifest last. A prefix that has a manifest is whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import SnapshotChanged, SnapshotError
from ..format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Asset, Manifest, Shard
from ..format.verify import verify
from ..sources.folder import FolderSource
from ..sources.source import Progress, Source, Writable


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a push did: files and bytes sent, and those that were there already; the manifest not counted."""

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
    """Copy the snapshot in `folder` to `destination`, which must be Writable: shards, assets, then the manifest.

    The files are verified first, unless the caller just did. What the destination's own manifest says is there with
    the same digests, and is there with the same size, is not sent again. A manifest of another snapshot is not
    overwritten unless `force`: whoever is reading that one finds it changed. Progress is of the bytes sent.
    Raises SnapshotCorrupt, SnapshotError, SourceError, CacheError.
    """
    if not isinstance(destination, Writable):
        raise SnapshotError(
            f"{destination.url} cannot be written to.", remedy="Push to s3:// or to a folder."
        )
    if not verified:
        verify(folder, manifest)
    sizes = _sizes(destination, manifest)
    there = _manifest_there(destination, force=force) if MANIFEST_NAME in sizes else None
    if there is not None and there.digest != manifest.digest and not force:
        raise SnapshotError(
            f"{destination.url} holds another snapshot, {there.digest[:12]}.",
            remedy="Push to a prefix of its own, or overwrite that one with --force.",
        )
    kept = {file.name for file in _kept(manifest, there, sizes)}
    sent = [file for file in manifest.files if file.name not in kept]
    _send(folder, sent, destination, progress)
    if there is None or sent or there.to_json() != manifest.to_json():
        destination.put(MANIFEST_NAME, manifest.to_json())
    sent_bytes = sum(file.size_bytes for file in sent)
    all_bytes = sum(file.size_bytes for file in manifest.files)
    return Pushed(len(sent), sent_bytes, len(kept), all_bytes - sent_bytes)


def _sizes(destination: Writable, manifest: Manifest) -> dict[str, int]:
    """The sizes of those of the snapshot's files that are there."""
    wanted = {file.name for file in manifest.files} | {MANIFEST_NAME}
    return {name: destination.size(name) for name in destination.names() if name in wanted}


def _manifest_there(destination: Source, *, force: bool) -> Manifest | None:
    size_bytes = destination.size(MANIFEST_NAME)
    buffer = bytearray(min(size_bytes, MAX_MANIFEST_BYTES + 1))
    count = destination.read_into(MANIFEST_NAME, 0, memoryview(buffer))
    try:
        return Manifest.parse(bytes(buffer[:count]))
    except SnapshotError as error:
        if force:
            return None
        raise SnapshotError(
            f"{destination.url} holds a manifest that cannot be read: {error.message}",
            remedy="Push to a prefix of its own, or overwrite it with --force.",
        ) from error


def _kept(manifest: Manifest, there: Manifest | None, sizes: dict[str, int]) -> Iterator[Shard | Asset]:
    if there is None:
        return
    known: set[Shard | Asset] = {*there.assets}
    if there.chunk_bytes == manifest.chunk_bytes:  # or the same digests would be of other bytes
        known |= {*there.shards}
    for file in manifest.files:
        if file in known and sizes.get(file.name) == file.size_bytes:
            yield file


def _send(folder: Path, files: list[Shard | Asset], destination: Writable, progress: Progress | None) -> None:
    source = FolderSource(folder)
    total_bytes, sent_bytes = sum(file.size_bytes for file in files), 0
    for file in files:
        if source.size(file.name) != file.size_bytes:
            raise SnapshotChanged(
                f"{file.name} in {folder} does not have its {file.size_bytes} bytes any more.",
                remedy="Make the manifest anew, or fetch the file again.",
            )
        destination.put(file.name, folder / file.name, _shifted(progress, sent_bytes, total_bytes))
        if destination.size(file.name) != file.size_bytes:
            raise SnapshotChanged(
                f"{file.name} in {destination.url} does not have the bytes that were sent.",
                remedy="See that nobody else writes there, and push again.",
            )
        sent_bytes += file.size_bytes


def _shifted(progress: Progress | None, before_bytes: int, total_bytes: int) -> Progress | None:
    if progress is None:
        return None
    return lambda done, _: progress(before_bytes + done, total_bytes)
