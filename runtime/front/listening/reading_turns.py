"""Lets connections read in turns if more bytes have arrived on them than one read takes.
The clients take turns, and so do the connections of each client.

Otherwise, one turn of the event loop could read from all connections, and libuv reads up to 32 times from each
connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

LOG = logging.getLogger(__name__)
READS, READING_S = 4, 0.5e-3
"""In one turn of the event loop, at most READS connections read on, and no connection begins after READING_S."""


class ReadingTurns:
    """The paused connections of each client, in the order in which they read on."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._count, self._is_due = 0, False

    def add(self, read_on: Callable[[], None], client: str = "") -> None:
        """Call `read_on` in a later turn of the event loop. The caller must have paused the connection."""
        self._waiting.setdefault(client, deque()).append(read_on)
        self._count += 1
        self._schedule()

    def _next(self) -> Callable[[], None]:
        """Remove and return the first entry of the next client."""
        client = next(iter(self._waiting))
        own = self._waiting.pop(client)
        read_on = own.popleft()
        self._count -= 1
        if own:
            self._waiting[client] = own
        return read_on

    def _schedule(self) -> None:
        if self._count and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take)

    def _take(self) -> None:
        until_s = time.perf_counter() + READING_S
        for _ in range(min(READS, self._count)):
            try:
                self._next()()
            except Exception:
                # The other connections must have their turns all the same.
                LOG.exception("a connection failed to read on")
            if time.perf_counter() > until_s:
                break
        self._is_due = False
        self._schedule()
