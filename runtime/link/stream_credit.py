"""The credit of a stream: how far it may run ahead of its reader."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

STREAM_PIECES = 64
STREAM_BYTES = 256 << 10


class Credit:
    """How many pieces, and bytes of them, may be on their way to the reader: whichever is reached first.

    A piece that is larger alone goes when nothing else is on its way. Waited for by one thread or by one task; granted
    and closed by the loop.
    """

    def __init__(self, pieces: int = STREAM_PIECES, size: int = STREAM_BYTES) -> None:
        self._most_pieces = pieces
        self._most_bytes = size
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._closed = False
        self._room = threading.Condition()
        self._changed = asyncio.Event()

    def spend(self, size: int, timeout_s: float | None) -> bool:
        """Takes room for a piece, blocking; False if none came in time, or nobody reads any more."""
        with self._room:
            if not self._fits(size):
                self._room.wait_for(lambda: self._closed or self._fits(size), timeout_s)
            return self._take(size)

    async def spend_async(self, size: int) -> bool:
        """Takes room for a piece; False if nobody reads any more."""
        while True:
            with self._room:
                if self._closed or self._fits(size):
                    return self._take(size)
                self._changed.clear()
            await self._changed.wait()

    def grant(self, pieces: int) -> None:
        """The reader has got the oldest so many."""
        with self._room:
            for _ in range(min(pieces, len(self._sizes))):
                self._bytes -= self._sizes.popleft()
            self._room.notify()
        self._changed.set()

    def close(self) -> None:
        """Nobody reads any more: whoever waits is told."""
        with self._room:
            self._closed = True
            self._room.notify()
        self._changed.set()

    def _fits(self, size: int) -> bool:
        return not self._sizes or (
            len(self._sizes) < self._most_pieces and self._bytes + size <= self._most_bytes
        )

    def _take(self, size: int) -> bool:
        if self._closed or not self._fits(size):
            return False
        self._sizes.append(size)
        self._bytes += size
        return True
