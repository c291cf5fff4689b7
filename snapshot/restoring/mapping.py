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
from ..sources.folder import FolderSource
from .fingerprint import FileFingerprint, Fingerprint, check_fingerprint

# Not in Python's mmap module before 3.13. Without it the kernel's heuristic refuses a writable private
# mapping larger than memory, though hardly a page of it is ever written.
_MAP_NORESERVE = 0x4000


class Mapping:
    """Opened shards. Tensors made from it keep their shard mapped: there is nothing to close.

    Never MAP_POPULATE: on a private writable mapping it copies every page (55-80 ms for 90 MB). Nor
    MADV_POPULATE_READ: the kernel maps 16 pages around each fault anyway. Restore and first forward of MiniLM
    in a forked child took 27-35 ms with ordinary faults, 32-36 when populated first, 28-42 with a thread that
    populates meanwhile.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        verified: Fingerprint | None = None,
        *,
        keep: object = None,
        arrival: Arrival | None = None,
    ) -> None:
        """Map the shards in folder `root`; SnapshotChanged if they are not the `verified` files.

        `keep`, a lease's hold, lives as long as anything that is mapped: what protects files outlives their
        lease. With an `arrival`, bytes may still be arriving: call `wait` before reading any.
        """
        self.manifest = manifest
        self.arrival = arrival
        if verified is not None and len(verified) != len(manifest.shards):
            raise SnapshotChanged(
                f"The fingerprint is of {len(verified)} files, the manifest of {len(manifest.shards)}.",
                remedy="Take the fingerprint of the files of this manifest.",
            )
        source = FolderSource(root)
        files: Sequence[FileFingerprint | None] = verified or [None] * len(manifest.shards)
        self._shards = [
            _map(source, shard, file, keep) for shard, file in zip(manifest.shards, files, strict=True)
        ]
        self._flats: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def wait(self, shard: int, begin: int, end: int, timeout_s: float = 600.0) -> None:
        """Block until bytes [begin, end) of a shard have landed. Raise what prevented it."""
        if self.arrival is not None:
            self.arrival.wait_bytes(shard, begin, end, timeout_s)

    def storage(self, shard: int) -> torch.UntypedStorage:
        """The whole shard from its first byte, as storage that tensors may be pointed at."""
        return self.flat(shard, torch.uint8).untyped_storage()

    def flat(self, shard: int, dtype: torch.dtype) -> torch.Tensor:
        """The whole shard from its first byte, as one flat tensor of `dtype`."""
        found = self._flats.get((shard, dtype))
        if found is None:
            memory = self._shards[shard]
            # frombuffer refuses to make an empty tensor. A file shorter than one element holds no tensor of
            # it either.
            count = 0 if memory is None else len(memory) // dtype.itemsize
            if memory is not None and count:
                found = torch.frombuffer(memory, dtype=dtype, count=count)
            else:
                found = torch.empty(0, dtype=dtype)
            self._flats[shard, dtype] = found
        return found


class _Memory(mmap.mmap):
    """A mapped shard. Tensors refer to it, and it refers to what protects its file."""

    keep: object = None


def _map(
    source: FolderSource, shard: Shard, verified: FileFingerprint | None, keep: object
) -> _Memory | None:
    try:
        descriptor = source.open(shard.name)
    except SnapshotError as error:
        raise SnapshotChanged(error.message, remedy=error.remedy) from error
    try:
        if verified is not None:
            check_fingerprint(descriptor, shard.name, verified)
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes != shard.size_bytes:
            raise SnapshotChanged(
                f"Shard {shard.name} has {size_bytes} bytes, {shard.size_bytes} expected.",
                remedy="Fetch it again, or make the manifest anew.",
            )
        if size_bytes == 0:
            return None
        flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        memory = _Memory(descriptor, size_bytes, flags=flags, prot=prot)
        memory.keep = keep
        return memory
    finally:
        os.close(descriptor)
