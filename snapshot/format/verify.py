"""Verifying a snapshot: read every byte, compare every digest, and name the damage by shard, chunk and tensor."""

from __future__ import annotations

from pathlib import Path

from ...errors import SnapshotCorrupt, SnapshotError
from ..sources.folder import FolderSource
from ..sources.source import ByteCounter, Progress, Source
from .digests import ASSET_BUFFER_BYTES, chunk_digests, file_digest
from .manifest import Asset, Manifest, Shard

_REMEDY = "Fetch the file again."


def verify(root: Path, manifest: Manifest, progress: Progress | None = None) -> None:
    """Read all shards and assets in folder `root`. `progress` counts bytes of shards.

    Raises SnapshotCorrupt for the first fault.
    """
    source = FolderSource(root)
    for index in range(len(manifest.shards)):
        _check_size(source, manifest, index)
    positions = {shard.name: index for index, shard in enumerate(manifest.shards)}
    read = ByteCounter(manifest.total_bytes, progress)
    sizes = {shard.name: shard.size_bytes for shard in manifest.shards}
    for chunk in chunk_digests(source, sizes, manifest.chunk_bytes):
        position = positions[chunk.name]
        if chunk.digest != manifest.shards[position].chunks[chunk.position]:
            raise corrupt_chunk(manifest, position, chunk.position)
        read.add(chunk.size_bytes)
    for asset in manifest.assets:
        _check_asset(source, asset)


def chunk_tensors(manifest: Manifest, shard: int, chunk: int) -> list[str]:
    """Return the names of the tensors that have bytes in a chunk, in the order of their bytes."""
    begin_bytes = chunk * manifest.chunk_bytes
    end_bytes = begin_bytes + manifest.chunk_bytes
    hit = [
        (tensor.offset_bytes, tensor.name)
        for tensor in manifest.tensors
        if tensor.shard == shard
        and tensor.offset_bytes < end_bytes
        and tensor.offset_bytes + tensor.size_bytes > begin_bytes
    ]
    return [name for _, name in sorted(hit)]


def corrupt_chunk(manifest: Manifest, index: int, chunk: int) -> SnapshotCorrupt:
    shard = manifest.shards[index]
    names = chunk_tensors(manifest, index, chunk)
    begin_bytes = chunk * manifest.chunk_bytes
    fault = f"chunk {chunk} of {len(shard.chunks)} (from byte {begin_bytes}), which {holding(names)}, differs"
    return _shard_fault(shard, fault, names, chunk)


def holding(names: list[str]) -> str:
    """Return "holds a, b, c and 4 more tensors", for a message."""
    if not names:
        return "holds the header only"
    shown = ", ".join(name[:120] for name in names[:3])
    return f"holds {shown}" if len(names) <= 3 else f"holds {shown} and {len(names) - 3} more tensors"


def _shard_fault(
    shard: Shard, fault: str, names: list[str] | None = None, chunk: int | None = None
) -> SnapshotCorrupt:
    details = {"shard": shard.name, "chunk": chunk, "tensors": (names or [])[:100]}
    return SnapshotCorrupt(f"Shard {shard.name}: {fault.rstrip('.')}.", remedy=_REMEDY, details=details)


def _check_size(source: Source, manifest: Manifest, index: int) -> None:
    shard = manifest.shards[index]
    try:
        size_bytes = source.size(shard.name)
    except SnapshotError as error:
        raise _shard_fault(shard, error.message) from error
    if size_bytes < shard.size_bytes:
        chunk = size_bytes // manifest.chunk_bytes
        names = chunk_tensors(manifest, index, chunk)
        fault = f"it has {size_bytes} of {shard.size_bytes} bytes: truncated in chunk {chunk}"
        raise _shard_fault(shard, f"{fault}, which {holding(names)}", names, chunk)
    if size_bytes > shard.size_bytes:
        raise _shard_fault(shard, f"it has {size_bytes} bytes, {shard.size_bytes} expected")


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
        buffer = memoryview(bytearray(min(size_bytes, ASSET_BUFFER_BYTES)))
        if file_digest(source, asset.name, size_bytes, buffer) == (asset.digest, size_bytes):
            return
        fault = "its bytes differ"
    raise SnapshotCorrupt(f"Asset {asset.name}: {fault}.", remedy=_REMEDY, details=details)
