"""Writes received bytes into files, hashes the bytes as they arrive, and verifies each chunk when it is complete."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..format.digests import Algorithm
from ..format.manifest import UNKNOWN_DIGEST, Manifest
from ..format.verify import corrupt_chunk
from ..publish import cannot_write
from ..sources.source import Connection
from .arrival import Arrival
from .blob_digests import BlobDigests
from .ranges import Part, Ranges

BOUNCE_BYTES = 512 << 10
"""The size of a connection's buffer. It is half of a core's second-level cache, so that bytes are still in the cache
when they are hashed and written."""
DIRECT_BYTES = 1 << 20
_RESUME_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """The open file of one shard. The file has exactly the size of the shard.

    `memory` is a shared mapping of the same file, into which bytes are received directly. It is given in two cases: if the
    pages of the file exist already, or if they are huge and not allocated yet. In the second case, `fresh` is set. For new
    small pages, pwrite is faster, because it needs no page fault for each page (docs/decisions.md).
    """

    name: str
    descriptor: int
    algorithm: Algorithm
    memory: memoryview | None = None
    fresh: bool = False

    def reserve(self, begin: int, end: int) -> None:
        """Allocate the pages of bytes [begin, end), if needed. Raise OSError if the file system is full.

        Without this call, a write to a page of `memory` that a full tmpfs cannot allocate would kill the process.
        """
        if self.fresh and begin < end:
            os.posix_fallocate(self.descriptor, begin, end - begin)

    def write(self, offset: int, view: memoryview) -> None:
        while view:
            count = os.pwrite(self.descriptor, view, offset)
            view, offset = view[count:], offset + count

    def fill(self, begin: int, end: int, buffer: memoryview, read: Callable[[memoryview, int], int]) -> str:
        """Fill bytes [begin, end), and return their digest. Return "" if `read` returns 0 before the end.

        `read(view, done)` puts the next bytes into a view, and returns their number. `done` is the number of bytes that were
        read before. Raise OSError if the bytes cannot be written.
        """
        hasher, at = self.algorithm.new(), begin
        self.reserve(begin, end)
        while at < end:
            view = buffer[: end - at] if self.memory is None else self.memory[at : min(at + len(buffer), end)]
            if not (count := read(view, at - begin)):
                return ""
            hasher.update(view[:count])
            if self.memory is None:
                self.write(at, view[:count])
            at += count
        return hasher.hexdigest()

    def digest(self, begin: int, end: int, buffer: memoryview) -> str:
        """Return the digest of bytes [begin, end) of the file, read piece by piece into `buffer`."""
        hasher, at = self.algorithm.new(), begin
        while at < end and (count := os.preadv(self.descriptor, [buffer[: end - at]], at)):
            hasher.update(buffer[:count])
            at += count
        return hasher.hexdigest()


@dataclass(slots=True)
class Landing:
    """Receives the bytes of one fetch, for all its threads. Verifies each chunk when it is complete."""

    manifest: Manifest
    targets: Sequence[ShardTarget]
    arrival: Arrival
    ranges: Ranges
    lock: threading.Condition
    """Guards `ranges`, `_filled` and `_bad`. Notified when a chunk has to be fetched again."""
    verify: bool
    blob_digests: BlobDigests
    received_bytes: int = 0
    _filled: dict[int, int] = field(default_factory=dict)
    """For each incomplete chunk that arrives in several pieces, the number of bytes received so far."""
    _bad: set[int] = field(default_factory=set)

    def receive(self, connection: Connection, part: Part, buffer: memoryview) -> None:
        """Receive `part` up to its end, which another thread may lower meanwhile.

        Raise CacheError if the bytes cannot be written, and the errors of Connection.read_into.
        """
        try:
            while part.at < part.end:
                self._receive_piece(connection, part, buffer)
        except OSError as error:
            raise cannot_write(Path(self.targets[part.shard].name), error) from error

    def _receive_piece(self, connection: Connection, part: Part, buffer: memoryview) -> None:
        """Receive `part` up to its end or the end of the current chunk, whichever comes first."""
        chunk = self.arrival.chunks.at(part.shard, part.at)
        extent, target = self.arrival.chunks.extent(chunk), self.targets[part.shard]
        begin, whole = part.at, part.at == extent.begin
        hasher = target.algorithm.new() if self.verify and whole else None
        direct = target.memory
        if direct is not None:
            target.reserve(begin, min(part.end, extent.end))
        try:
            while (left := min(part.end, extent.end) - part.at) > 0:
                if direct is not None:
                    view = direct[part.at : part.at + min(left, DIRECT_BYTES)]
                else:
                    view = buffer[: min(left, BOUNCE_BYTES)]
                count = connection.read_into(view)
                if hasher is not None:
                    hasher.update(view[:count])
                if direct is None:
                    target.write(part.at, view[:count])
                part.at += count
                part.asked_s = time.monotonic()
                # Do not lock: if threads overwrite an increment, the rate and the statistics are only slightly low.
                self.received_bytes += count
        finally:
            digest = hasher.hexdigest() if hasher is not None and part.at == extent.end else None
            self._settle(chunk, part.at - begin, digest, buffer)

    def _settle(self, chunk: int, count: int, digest: str | None, buffer: memoryview) -> None:
        """Count `count` more bytes of `chunk`. If it is complete, verify it and record that it has landed.

        `digest` is the digest of the whole chunk. It is None if the chunk is not complete, or if nothing is verified. It is
        also None if the chunk was received in several pieces. Then the chunk is read again for its digest.
        """
        extent = self.arrival.chunks.extent(chunk)
        with self.lock:
            filled = self._filled.pop(chunk, 0) + count
            if filled < extent.end - extent.begin:
                if filled:
                    self._filled[chunk] = filled
                return
        if self.verify and digest is None:
            target = self.targets[extent.shard]
            if target.memory is not None:
                digest = target.algorithm.digest(target.memory[extent.begin : extent.end])
            else:
                digest = target.digest(extent.begin, extent.end, buffer)
        if self.verify and digest is not None and not self.arrival.chunks.accept(chunk, digest):
            self._refuse(chunk)
            return
        self.blob_digests.settle(chunk)

    def _refuse(self, chunk: int) -> None:
        with self.lock:
            if chunk not in self._bad:
                self._bad.add(chunk)
                self.ranges.again(chunk)
                self.lock.notify_all()
                return
        extent = self.arrival.chunks.extent(chunk)
        raise corrupt_chunk(self.manifest, extent.shard, extent.begin // self.manifest.chunk_bytes)


def copy_landed(
    manifest: Manifest,
    landed: Arrival,
    source: Path,
    targets: Sequence[ShardTarget],
    cancelled: threading.Event,
) -> None:
    """Copy to `targets` the chunks that have landed in the files in folder `source`. Raise OSError.

    Return early, without an error, once `cancelled` is set.
    """
    buffer = memoryview(bytearray(_RESUME_BUFFER_BYTES))
    for index, shard in enumerate(manifest.shards):
        with (source / shard.name).open("rb", buffering=0) as stream:
            for chunk in landed.chunks.of_shard(index):
                if cancelled.is_set():
                    return
                at, end = landed.chunks.extent(chunk).begin, landed.chunks.extent(chunk).end
                while landed.landed(chunk) and at < end:
                    count = os.preadv(stream.fileno(), [buffer[: end - at]], at)
                    targets[index].write(at, buffer[:count])
                    at += count


def land_existing(
    manifest: Manifest,
    targets: Sequence[ShardTarget],
    arrival: Arrival,
    cancelled: threading.Event,
    learned: Sequence[str] | None = None,
) -> None:
    """Record as landed every chunk whose bytes the files already have. Do not read parts of files that were never written.

    `learned` are the digests that an earlier fetch has computed, if the manifest has none. The files are read and hashed
    (5 GB/s from memory), because a stored record of the landed chunks could be wrong after a crash. Return early, without
    an error, once `cancelled` is set.
    """
    buffer = memoryview(bytearray(_RESUME_BUFFER_BYTES))
    shard = data_at = -1
    digests = learned or arrival.chunks.digests
    for chunk in arrival.chunks.needed():
        digest = digests[chunk]
        if cancelled.is_set():
            return
        extent = arrival.chunks.extent(chunk)
        if extent.shard != shard:
            shard, data_at = extent.shard, 0
        target = targets[shard]
        if data_at < extent.end:
            data_at = _next_data(target.descriptor, extent.begin, manifest.shards[shard].size_bytes)
        if data_at >= extent.end or arrival.landed(chunk) or digest == UNKNOWN_DIGEST:
            continue
        found = target.digest(extent.begin, extent.end, buffer)
        if found == digest and arrival.chunks.accept(chunk, found):
            arrival.land(chunk)


def _next_data(descriptor: int, offset: int, size_bytes: int) -> int:
    """Return the first offset >= `offset` with written data, or `size_bytes` if there is no such offset."""
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError as error:
        # ENXIO means that nothing was written after `offset`. After any other error, assume that there is data.
        return size_bytes if error.errno == errno.ENXIO else offset
