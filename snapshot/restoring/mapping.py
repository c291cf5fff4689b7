"""Maps the shards of a snapshot into memory: private, copied on write, and paged in on first access."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ...errors import SnapshotChanged, SnapshotError
from ..fetching.arrival import Arrival
from ..format.manifest import Manifest, Shard
from ..sources.folder import FolderSource, object_info
from ..sources.source import ObjectInfo

# Python's mmap module has this constant since 3.13. Without the flag, the kernel's heuristic refuses a
# writable private mapping larger than the memory, although hardly a page of it is ever written.
_MAP_NORESERVE = 0x4000


class Mapping:
    """The mapped shards of a snapshot. There is nothing to close: a shard stays mapped while tensors use it.

    MAP_POPULATE is not used, because on a private writable mapping it copies every page (55-80 ms for 90 MB).
    MADV_POPULATE_READ is not used, because it saves no time: the kernel maps 16 pages at each fault anyway.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        verified: Sequence[ObjectInfo] | None = None,
        *,
        keep: object = None,
        arrival: Arrival | None = None,
    ) -> None:
        """Map the shards in folder `root`.

        `verified` is what `FolderSource.stat` returned for each shard when it was verified. Raises
        SnapshotChanged if a shard differs from that, is missing, or does not have the manifest's size. `keep`, such as a
        lease, is referenced as long as any shard is mapped. With `arrival`, bytes may still be arriving: call
        `wait` before reading them.
        """
        self.manifest = manifest
        self.arrival = arrival
        if verified is not None and len(verified) != len(manifest.shards):
            fault = f"{len(verified)} files were verified, the manifest has {len(manifest.shards)}."
            raise SnapshotChanged(fault, remedy="Verify the files of this manifest.")
        source = FolderSource(root)
        files: Sequence[ObjectInfo | None] = verified or [None] * len(manifest.shards)
        self.flats = [_map(source, *pair, keep) for pair in zip(manifest.shards, files, strict=True)]
        """For each shard, all its bytes as a one-dimensional tensor of uint8."""

    def wait(self, shard: int, begin: int, end: int) -> None:
        """Block until bytes [begin, end) of a shard have landed. Raises the errors of Arrival.wait."""
        if self.arrival is not None and begin < end:
            self.arrival.wait(*self.arrival.chunks.covering(shard, begin, end), 600.0)


class _Memory(mmap.mmap):
    """A mapped shard. Its tensors refer to it, and it refers to `keep`, which protects its file."""

    keep: object = None


def _map(source: FolderSource, shard: Shard, verified: ObjectInfo | None, keep: object) -> torch.Tensor:
    try:
        descriptor = source.open(shard.name)
    except SnapshotError as error:
        raise SnapshotChanged(error.message, remedy=error.remedy) from error
    try:
        found = object_info(descriptor)
        if found.size_bytes != shard.size_bytes:
            fault = f"Shard {shard.name} has {found.size_bytes} bytes, {shard.size_bytes} expected."
            raise SnapshotChanged(fault, remedy="Fetch it again, or make the manifest anew.")
        if verified not in {None, found}:
            remedy = "Verify the snapshot again, and publish new weights under a new name."
            raise SnapshotChanged(f"Shard {shard.name} was replaced or written to.", remedy=remedy)
        if not found.size_bytes:
            # Neither mmap nor frombuffer accepts a size of zero.
            return torch.empty(0, dtype=torch.uint8)
        flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        memory = _Memory(descriptor, found.size_bytes, flags=flags, prot=prot)
        memory.keep = keep
        return torch.frombuffer(memory, dtype=torch.uint8)
    finally:
        os.close(descriptor)
