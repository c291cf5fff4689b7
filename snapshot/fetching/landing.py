"""Landing: bytes that arrive are written where they belong, hashed on the way, and their chunks judged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import xxhash

from ..format.manifest import Manifest
from ..format.verify import corrupt_chunk
from ..sources.source import Connection, Progress
from .arrival import Arrival
from .ranges import Part, Ranges
from .target import ShardTarget

Received = Callable[[Part, int], None]
"""Called with the part and the bytes that have just come."""

BOUNCE_BYTES = 512 << 10
"""Half of a core's second-level cache: received, hashed and written while it is there."""
DIRECT_BYTES = 1 << 20


class Landing:
    """All threads' bytes of one fetch. What is written is counted per chunk; a full chunk is verified, then told."""

    def __init__(
        self,
        manifest: Manifest,
        targets: Sequence[ShardTarget],
        arrival: Arrival,
        ranges: Ranges,
        lock: threading.Condition,
        *,
        verify: bool,
        progress: Progress | None,
    ) -> None:
        self._manifest = manifest
        self._targets = targets
        self._arrival = arrival
        self._ranges = ranges
        self._lock = lock
        self._verify = verify
        self._progress = progress
        self._digests = [digest for shard in manifest.shards for digest in shard.chunks]
        self._filled: dict[int, int] = {}
        """Bytes that are there of chunks that came in pieces."""
        self._bad: set[int] = set()
        self.landed_bytes = 0

    def receive(self, connection: Connection, part: Part, buffer: memoryview, on_bytes: Received) -> None:
        """Read `part` to its end, which may come nearer meanwhile. Raises what the connection or the disk raise."""
        while part.at < part.end:
            self._receive_piece(connection, part, buffer, on_bytes)

    def _receive_piece(
        self, connection: Connection, part: Part, buffer: memoryview, on_bytes: Received
    ) -> None:
        """Up to the end of the chunk that `part` stands in, or of the part."""
        chunk = self._ranges.chunk_at(part.shard, part.at)
        extent, target = self._ranges.extent(chunk), self._targets[part.shard]
        begin, whole = part.at, part.at == extent.begin
        hasher = xxhash.xxh3_128() if self._verify and whole else None
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
                on_bytes(part, count)
        finally:
            digest = hasher.hexdigest() if hasher is not None and part.at == extent.end else None
            self._settle(chunk, part.at - begin, digest, buffer)

    def _settle(self, chunk: int, count: int, digest: str | None, buffer: memoryview) -> None:
        extent = self._ranges.extent(chunk)
        size = extent.end - extent.begin
        with self._lock:
            filled = self._filled.pop(chunk, 0) + count
            if filled < size:
                if filled:
                    self._filled[chunk] = filled
                return
        if self._verify and digest is None:
            digest = self._reread(chunk, buffer)
        if self._verify and digest != self._digests[chunk]:
            self._refuse(chunk)
            return
        with self._lock:
            self.landed_bytes += size
            done = self.landed_bytes
        self._arrival.land(chunk)
        if self._progress is not None:
            self._progress(done, self._manifest.total_bytes)

    def _refuse(self, chunk: int) -> None:
        with self._lock:
            if chunk not in self._bad:
                self._bad.add(chunk)
                self._ranges.again(chunk)
                self._lock.notify_all()
                return
        extent = self._ranges.extent(chunk)
        raise corrupt_chunk(self._manifest, extent.shard, extent.begin // self._manifest.chunk_bytes)

    def _reread(self, chunk: int, buffer: memoryview) -> str:
        """The digest of a chunk that came in pieces, from where it was written to."""
        extent = self._ranges.extent(chunk)
        target = self._targets[extent.shard]
        if target.memory is not None:
            return xxhash.xxh3_128_hexdigest(target.memory[extent.begin : extent.end])
        hasher, at = xxhash.xxh3_128(), extent.begin
        while at < extent.end:
            count = target.read_into(at, buffer[: min(len(buffer), extent.end - at)])
            if count == 0:
                break
            hasher.update(buffer[:count])
            at += count
        return hasher.hexdigest()
