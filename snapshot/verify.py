"""Verifying a snapshot: every byte read, every chunk's digest compared, the damage named."""

from __future__ import annotations

from pathlib import Path

from ..errors import SnapshotCorrupt, SnapshotError
from .chunk import Progress, chunk_digests, file_digest
from .folder import FolderSource
from .manifest import Asset, Manifest, Shard
from .source import Source

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
                raise _corrupt(manifest, index, chunk)
            done_bytes += count
            if progress is not None:
                progress(done_bytes, manifest.total_bytes)
    for asset in manifest.assets:
        _check_asset(source, asset)


def chunk_tensors(manifest: Manifest, shard: int, chunk: int) -> list[str]:
    """The tensors that have bytes in a chunk, in the order in which they lie."""
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


def _check_size(source: Source, manifest: Manifest, index: int) -> None:
    shard = manifest.shards[index]
    try:
        size_bytes = source.size(shard.name)
    except SnapshotError as error:
        raise _fault(shard, error.message, []) from error
    if size_bytes < shard.size_bytes:
        chunk = size_bytes // manifest.chunk_bytes
        names = chunk_tensors(manifest, index, chunk)
        what = f"it has {size_bytes} of {shard.size_bytes} bytes: truncated in chunk {chunk}"
        raise _fault(shard, f"{what}, which {_holding(names)}", names, chunk)
    if size_bytes > shard.size_bytes:
        raise _fault(shard, f"it has {size_bytes} bytes, {shard.size_bytes} expected", [])


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


def _corrupt(manifest: Manifest, index: int, chunk: int) -> SnapshotCorrupt:
    shard = manifest.shards[index]
    names = chunk_tensors(manifest, index, chunk)
    begin_bytes = chunk * manifest.chunk_bytes
    what = f"chunk {chunk} of {len(shard.chunks)} (from byte {begin_bytes}), which {_holding(names)}, differs"
    return _fault(shard, what, names, chunk)


def _fault(shard: Shard, what: str, names: list[str], chunk: int | None = None) -> SnapshotCorrupt:
    details = {"shard": shard.name, "chunk": chunk, "tensors": names[:100]}
    return SnapshotCorrupt(f"Shard {shard.name}: {what.rstrip('.')}.", remedy=_REMEDY, details=details)


def _holding(names: list[str]) -> str:
    if not names:
        return "holds the header only"
    shown = ", ".join(name[:120] for name in names[:3])
    return f"holds {shown}" if len(names) <= 3 else f"holds {shown} and {len(names) - 3} more tensors"
