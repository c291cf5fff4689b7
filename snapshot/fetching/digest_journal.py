"""Keeps the digests that a fetch computes in a file, so that a later fetch into the same files can continue.

A fetch computes digests if its manifest has none (see `Manifest.observed`). After a crash the file may be wrong. So a
later fetch uses a digest from the file only if the chunk's bytes in the shard have that digest.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...errors import SnapshotCorrupt
from ..format.manifest import UNKNOWN_DIGEST
from .arrival import Arrival

# The number of a chunk, and its digest.
_ENTRY = struct.Struct("<I16s")


@contextmanager
def learned_digests(path: Path, arrival: Arrival) -> Iterator[list[str]]:
    """Yield the digests of all chunks from file `path`, with UNKNOWN_DIGEST for chunks that are not in the file.

    Within the block, the digest of every chunk that lands in `arrival` is appended to the file. Raise OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    journal = _Journal(descriptor, arrival)
    try:
        digests = _read(descriptor, arrival.count)
        arrival.on_land(journal.add)
        yield digests
    except SnapshotCorrupt:
        # A blob does not have the digest that the source attests (see `blob_digests`). Discard all digests, because any of its
        # chunks may be wrong.
        journal.clear()
        raise
    finally:
        if journal.close() == 0:
            path.unlink(missing_ok=True)


class _Journal:
    def __init__(self, descriptor: int, arrival: Arrival) -> None:
        self._descriptor, self._arrival = descriptor, arrival
        self._lock = threading.Lock()

    def add(self, chunk: int) -> None:
        digest = bytes.fromhex(self._arrival.chunks.digests[chunk])
        # Ignore a full disk: if the digest is lost, a later fetch only fetches the chunk again.
        with self._lock, suppress(OSError):
            if self._descriptor >= 0:
                os.write(self._descriptor, _ENTRY.pack(chunk, digest))

    def clear(self) -> None:
        with self._lock:
            os.ftruncate(self._descriptor, 0)

    def close(self) -> int:
        """Close the file, and return its size."""
        with self._lock:
            size_bytes = os.fstat(self._descriptor).st_size
            os.close(self._descriptor)
            self._descriptor = -1
        return size_bytes


def _read(descriptor: int, count: int) -> list[str]:
    """Return the digests of `count` chunks. Remove an entry that was not written completely."""
    digests = [UNKNOWN_DIGEST] * count
    text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    whole = len(text) - len(text) % _ENTRY.size
    os.ftruncate(descriptor, whole)
    for chunk, digest in _ENTRY.iter_unpack(text[:whole]):
        if chunk < count:
            digests[chunk] = digest.hex()
    return digests
