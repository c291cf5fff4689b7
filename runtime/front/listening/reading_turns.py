"""Lets the connections that have more bytes than one read takes read on in turns.

Otherwise, one turn of the event loop could read from all of them, and libuv reads up to 32 times from each.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

LOG = logging.getLogger(__name__)
READS, READING_S = 4, 0.5e-3
"""How many connections read on in one turn of the event loop, and after which time no other does."""


class ReadingTurns:
    """The paused connections, in the order in which they read on."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def add(self, read_on: Callable[[], None]) -> None:
        """Call `read_on` in a later turn of the event loop. The caller has paused its connection."""
        self._waiting.append(read_on)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        until_s = time.perf_counter() + READING_S
        for _ in range(min(READS, len(self._waiting))):
            try:
                self._waiting.popleft()()
            except Exception:
                # The other connections must have their turns all the same.
                LOG.exception("a connection failed to read on")
            if time.perf_counter() > until_s:
                break
        self._is_due = False
        self._schedule()
