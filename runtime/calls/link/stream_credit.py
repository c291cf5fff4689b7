"""Limits how much of a stream is sent before its reader has received it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

STREAM_CHUNKS = 64
STREAM_BYTES = 256 << 10
# The largest piece of an exchange. A reader reports the pieces that it has received after READ_CHUNKS pieces or READ_BYTES
# bytes. So the pieces that it has not reported always leave credit for another piece.
PIECE_BYTES = 64 << 10
READ_CHUNKS = STREAM_CHUNKS // 4
READ_BYTES = STREAM_BYTES // 4


class Credit:
    """Limits the chunks of one stream that were sent but not yet received, in number and in bytes.

    A chunk that alone exceeds the byte limit is sent once all earlier chunks were received. One thread or one
    task, the sender, calls `spend` or `spend_async`. The event loop calls `grant` and `close`.
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
        """Wait until a chunk of `size` bytes may be sent, and count it as sent.

        Return False if the reader went away or `timeout_s` passed. This blocks, so only handler threads may call it.
        """
        with self._room:
            if not self._fits(size):
                self._room.wait_for(lambda: self._closed or self._fits(size), timeout_s)
            return self._take(size)

    async def spend_async(self, size: int) -> bool:
        """Wait until a chunk may be sent, and count it as sent. Return False if the reader went away."""
        while True:
            with self._room:
                if self._closed or self._fits(size):
                    return self._take(size)
                self._changed.clear()
            await self._changed.wait()

    def grant(self, chunks: int) -> None:
        """Stop counting the oldest `chunks`, which the reader has received, and wake the sender."""
        with self._room:
            for _ in range(min(chunks, len(self._sizes))):
                self._bytes -= self._sizes.popleft()
            self._room.notify()
        self._changed.set()

    def close(self) -> None:
        """Wake the sender and refuse all further chunks, because the reader went away."""
        with self._room:
            self._closed = True
            self._room.notify()
        self._changed.set()

    def _fits(self, size: int) -> bool:
        full = len(self._sizes) >= self._max_chunks or self._bytes + size > self._max_bytes
        return not self._sizes or not full

    def _take(self, size: int) -> bool:
        if self._closed or not self._fits(size):
            return False
        self._sizes.append(size)
        self._bytes += size
        return True


class ReadPieces:
    """Counts the pieces that a reader has received, until there are enough to report them to the sender.

    One report for several pieces saves frames. The sender of pieces of at most PIECE_BYTES never waits for a report that the
    reader does not send.
    """

    __slots__ = ("_bytes", "_count")

    def __init__(self) -> None:
        self._count = self._bytes = 0

    def add(self, size: int) -> int:
        """Count a piece of `size` bytes. Return the number of pieces to report now, which is often 0."""
        self._count += 1
        self._bytes += size
        if self._count < READ_CHUNKS and self._bytes < READ_BYTES:
            return 0
        count, self._count, self._bytes = self._count, 0, 0
        return count
