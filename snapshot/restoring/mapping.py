"""A snapshot's shards as memory: mapped private, copy-on-write, paged in when touched."""

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

# Not in Python's mmap module before 3.13. Without it the kernel's heuristic refuses a writable private
# mapping larger than memory, though hardly a page of it is ever written.
_MAP_NORESERVE = 0x4000


class Mapping:
    """Opened shards. Tensors made from it keep their shard mapped: there is nothing to close.

    Never MAP_POPULATE: on a private writable mapping it copies every page (55-80 ms for 90 MB). Nor
    MADV_POPULATE_READ, which gains nothing: the kernel maps 16 pages around each fault anyway.
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
        """Map the shards in folder `root`; SnapshotChanged if they are not the `verified` files (see `stat`).

        `keep`, a lease's hold, lives as long as anything that is mapped: what protects files outlives their
        lease. With an `arrival`, bytes may still be arriving: call `wait` before reading any.
        """
        self.manifest = manifest
        self.arrival = arrival
        if verified is not None and len(verified) != len(manifest.shards):
            fault = f"{len(verified)} files were verified, the manifest has {len(manifest.shards)}."
            raise SnapshotChanged(fault, remedy="Verify the files of this manifest.")
        source = FolderSource(root)
        files: Sequence[ObjectInfo | None] = verified or [None] * len(manifest.shards)
        self.flats = [_map(source, *pair, keep) for pair in zip(manifest.shards, files, strict=True)]
        """Each whole shard from its first byte, as a flat tensor of uint8."""

    def wait(self, shard: int, begin: int, end: int) -> None:
        """Block until bytes [begin, end) of a shard have landed. Raise what prevented it."""
        if self.arrival is not None and begin < end:
            self.arrival.wait(*self.arrival.chunks.covering(shard, begin, end), 600.0)


class _Memory(mmap.mmap):
    """A mapped shard. Tensors refer to it, and it refers to what protects its file."""

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
            # Neither mmap nor frombuffer makes something empty.
            return torch.empty(0, dtype=torch.uint8)
        flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        memory = _Memory(descriptor, found.size_bytes, flags=flags, prot=prot)
        memory.keep = keep
        return torch.frombuffer(memory, dtype=torch.uint8)
    finally:
        os.close(descriptor)
