"""Damage, in words: which shard, which chunk, which tensors."""

from __future__ import annotations

from ...errors import SnapshotCorrupt
from .manifest import Manifest, Shard

_REMEDY = "Fetch the file again."


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


def corrupt_chunk(manifest: Manifest, index: int, chunk: int) -> SnapshotCorrupt:
    """What to raise for a chunk whose digest differs; names shard, chunk and tensors."""
    shard = manifest.shards[index]
    names = chunk_tensors(manifest, index, chunk)
    begin_bytes = chunk * manifest.chunk_bytes
    what = f"chunk {chunk} of {len(shard.chunks)} (from byte {begin_bytes}), which {holding(names)}, differs"
    return shard_fault(shard, what, names, chunk)


def shard_fault(shard: Shard, what: str, names: list[str], chunk: int | None = None) -> SnapshotCorrupt:
    """What to raise for a shard that is not what the manifest says."""
    details = {"shard": shard.name, "chunk": chunk, "tensors": names[:100]}
    return SnapshotCorrupt(f"Shard {shard.name}: {what.rstrip('.')}.", remedy=_REMEDY, details=details)


def holding(names: list[str]) -> str:
    """ "holds a, b, c and 4 more tensors"."""
    if not names:
        return "holds the header only"
    shown = ", ".join(name[:120] for name in names[:3])
    return f"holds {shown}" if len(names) <= 3 else f"holds {shown} and {len(names) - 3} more tensors"
