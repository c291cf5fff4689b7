"""Verifying a snapshot: every byte read, every chunk's digest compared, the damage named."""

from __future__ import annotations

from pathlib import Path

from ...errors import SnapshotCorrupt, SnapshotError
from ..sources.folder import FolderSource
from ..sources.source import Progress, Source
from .chunk import chunk_digests, file_digest
from .damage import chunk_tensors, corrupt_chunk, holding, shard_fault
from .manifest import Asset, Manifest

_ASSET_BUFFER_BYTES = 1 << 20
_REMEDY = "Fetch the file again."


def verify(root: Path, manifest: Manifest, progress: Progress | None = None) -> None:
    """Read all shards and assets under folder `root`; SnapshotCorrupt names the first fault. Progress is of shards."""
    source = FolderSource(root)
    for index in range(len(manifest.shards)):
        _check_size(source, manifest, index)
    largest_bytes = max((shard.size_bytes for shard in manifest.shards), default=0)
    # Never larger than the largest file, and exactly one chunk long if there is more than one.
    buffer = memoryview(bytearray(max(1, min(manifest.chunk_bytes, largest_bytes))))
    done_bytes = 0
    for index, shard in enumerate(manifest.shards):
        for chunk, (digest, count) in enumerate(chunk_digests(source, shard.name, shard.size_bytes, buffer)):
            if digest != shard.chunks[chunk]:
                raise corrupt_chunk(manifest, index, chunk)
            done_bytes += count
            if progress is not None:
                progress(done_bytes, manifest.total_bytes)
    for asset in manifest.assets:
        _check_asset(source, asset)


def _check_size(source: Source, manifest: Manifest, index: int) -> None:
    shard = manifest.shards[index]
    try:
        size_bytes = source.size(shard.name)
    except SnapshotError as error:
        raise shard_fault(shard, error.message, []) from error
    if size_bytes < shard.size_bytes:
        chunk = size_bytes // manifest.chunk_bytes
        names = chunk_tensors(manifest, index, chunk)
        what = f"it has {size_bytes} of {shard.size_bytes} bytes: truncated in chunk {chunk}"
        raise shard_fault(shard, f"{what}, which {holding(names)}", names, chunk)
    if size_bytes > shard.size_bytes:
        raise shard_fault(shard, f"it has {size_bytes} bytes, {shard.size_bytes} expected", [])


def _check_asset(source: Source, asset: Asset) -> None:
    details = {"asset": asset.name}
    try:
        size_bytes = source.size(asset.name)
    except SnapshotError as error:
        raise SnapshotCorrupt(
            f"Asset {asset.name}: {error.message}", remedy=_REMEDY, details=details
        ) from error
    if size_bytes != asset.size_bytes:
        fault = f"it has {size_bytes} bytes, {asset.size_bytes} expected"
    else:
        buffer = memoryview(bytearray(min(size_bytes, _ASSET_BUFFER_BYTES)))
        if file_digest(source, asset.name, size_bytes, buffer) == (asset.digest, size_bytes):
            return
        fault = "its bytes differ"
    raise SnapshotCorrupt(f"Asset {asset.name}: {fault}.", remedy=_REMEDY, details=details)
