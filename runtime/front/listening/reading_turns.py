"""Lets the connections that have more bytes than one read takes read on in turns.

Otherwise, one turn of the event loop could read from all of them, and libuv reads up to 32 times from each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

READS = 4
"""How many connections read on in one turn of the event loop."""


class ReadingTurns:
    """The paused connections, in the order in which they read on."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, read_on: Callable[[], None]) -> None:
        """Call `read_on` in a later turn of the event loop. The caller has paused its connection."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._take)
        self._waiting.append(read_on)

    def _take(self) -> None:
        for _ in range(min(READS, len(self._waiting))):
            self._waiting.popleft()()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._take)
