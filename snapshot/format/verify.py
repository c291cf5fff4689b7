"""Verifies a snapshot: reads every byte, compares every digest, and reports where the first fault is."""

from __future__ import annotations

from pathlib import Path

from ...errors import SnapshotCorrupt, SnapshotError
from ..sources.folder import FolderSource
from ..sources.source import ByteCounter, ReportProgress, Source
from .digests import ASSET_BUFFER_BYTES, Algorithm, chunk_digests, file_digest
from .layout import some
from .manifest import Asset, Manifest, Shard

_REMEDY = "Fetch the file again."


def verify(root: Path, manifest: Manifest, progress: ReportProgress | None = None) -> None:
    """Compare all files in folder `root` with the manifest. Raise SnapshotCorrupt for the first fault."""
    source, algorithm = FolderSource(root), manifest.digest_algorithm
    for index in range(len(manifest.shards)):
        _check_size(source, manifest, index)
    read = ByteCounter(manifest.total_bytes, progress)
    for index, shard in enumerate(manifest.shards):
        sizes = {shard.name: shard.size_bytes}
        for chunk in chunk_digests(source, sizes, manifest.chunk_bytes, algorithm=algorithm):
            if chunk.digest != shard.chunks[chunk.position]:
                raise corrupt_chunk(manifest, index, chunk.position)
            read.add(chunk.size_bytes)
    for asset in manifest.assets:
        _check_asset(source, asset, algorithm)


def chunk_tensors(manifest: Manifest, shard: int, chunk: int) -> list[str]:
    """Return the names of the tensors with bytes in chunk number `chunk` of shard number `shard`, in file order."""
    begin_bytes = chunk * manifest.chunk_bytes
    end_bytes = begin_bytes + manifest.chunk_bytes
    before = [one for one in manifest.tensors if one.shard == shard and one.offset_bytes < end_bytes]
    hit = [tensor for tensor in before if tensor.offset_bytes + tensor.size_bytes > begin_bytes]
    return [tensor.name for tensor in sorted(hit, key=lambda tensor: tensor.offset_bytes)]


def corrupt_chunk(manifest: Manifest, index: int, chunk: int) -> SnapshotCorrupt:
    fault, names = chunk_fault(manifest, index, chunk), chunk_tensors(manifest, index, chunk)
    return _shard_fault(manifest.shards[index], fault, names, chunk)


def chunk_fault(manifest: Manifest, index: int, chunk: int) -> str:
    """Return the text of a message that a chunk has another digest, with the names of the tensors in the chunk."""
    place = (
        f"chunk {chunk} of {len(manifest.shards[index].chunks)} (from byte {chunk * manifest.chunk_bytes})"
    )
    return f"{place}, which {holding(chunk_tensors(manifest, index, chunk))}, differs"


def holding(names: list[str]) -> str:
    return f"holds {some(names, 3)}" if names else "holds the header only"


def _shard_fault(shard: Shard, fault: str, names: list[str], chunk: int | None) -> SnapshotCorrupt:
    details = {"shard": shard.name, "chunk": chunk, "tensors": names[:100]}
    return SnapshotCorrupt(f"Shard {shard.name}: {fault.rstrip('.')}.", remedy=_REMEDY, details=details)


def _check_size(source: Source, manifest: Manifest, index: int) -> None:
    shard = manifest.shards[index]
    try:
        size_bytes = source.stat(shard.name).size_bytes
    except SnapshotError as error:
        raise _shard_fault(shard, error.message, [], None) from error
    if size_bytes < shard.size_bytes:
        chunk = size_bytes // manifest.chunk_bytes
        names = chunk_tensors(manifest, index, chunk)
        fault = f"it has {size_bytes} of {shard.size_bytes} bytes: truncated in chunk {chunk}"
        raise _shard_fault(shard, f"{fault}, which {holding(names)}", names, chunk)
    if size_bytes > shard.size_bytes:
        raise _shard_fault(shard, f"it has {size_bytes} bytes, {shard.size_bytes} expected", [], None)


def _check_asset(source: Source, asset: Asset, algorithm: Algorithm) -> None:
    buffer = memoryview(bytearray(min(asset.size_bytes, ASSET_BUFFER_BYTES)))
    fault = "its bytes differ"
    try:
        size_bytes = source.stat(asset.name).size_bytes
        if size_bytes != asset.size_bytes:
            fault = f"it has {size_bytes} bytes, {asset.size_bytes} expected"
        elif file_digest(source, asset.name, size_bytes, buffer, algorithm) == (asset.digest, size_bytes):
            return
    except SnapshotError as error:
        fault = error.message.rstrip(".")
    raise SnapshotCorrupt(f"Asset {asset.name}: {fault}.", remedy=_REMEDY, details={"asset": asset.name})
