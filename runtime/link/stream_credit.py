"""Stream credit: how far a streamed response may run ahead of its reader."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

STREAM_CHUNKS = 64
STREAM_BYTES = 256 << 10


class Credit:
    """Limits the chunks of one stream that are on their way to the reader, by count and by bytes.

    A chunk over the byte limit is sent when nothing else is on its way. One thread or one task waits; the
    event loop grants and closes.
    """

    def __init__(self, max_chunks: int = STREAM_CHUNKS, max_bytes: int = STREAM_BYTES) -> None:
        self._max_chunks = max_chunks
        self._max_bytes = max_bytes
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._closed = False
        self._room = threading.Condition()
        self._changed = asyncio.Event()

    def spend(self, size: int, timeout_s: float | None) -> bool:
        """Wait for room for a chunk and take it. Return False after `timeout_s` or without a reader."""
        with self._room:
            if not self._fits(size):
                self._room.wait_for(lambda: self._closed or self._fits(size), timeout_s)
            return self._take(size)

    async def spend_async(self, size: int) -> bool:
        """Wait for room for a chunk and take it. Return False if the reader went away."""
        while True:
            with self._room:
                if self._closed or self._fits(size):
                    return self._take(size)
                self._changed.clear()
            await self._changed.wait()

    def grant(self, chunks: int) -> None:
        """The reader has received the oldest `chunks`."""
        with self._room:
            for _ in range(min(chunks, len(self._sizes))):
                self._bytes -= self._sizes.popleft()
            self._room.notify()
        self._changed.set()

    def close(self) -> None:
        """The reader went away: wake the sender."""
        with self._room:
            self._closed = True
            self._room.notify()
        self._changed.set()

    def _fits(self, size: int) -> bool:
        return not self._sizes or (
            len(self._sizes) < self._max_chunks and self._bytes + size <= self._max_bytes
        )

    def _take(self, size: int) -> bool:
        if self._closed or not self._fits(size):
            return False
        self._sizes.append(size)
        self._bytes += size
        return True
