"""Ends the answers that have no end of their own when the gateway drains: the console and followed logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class EndlessAnswers:
    """The endless answers that the gateway sends now."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def limited(self, most_s: float | None = None) -> AsyncIterator[None]:
        """Run the block. Cancel it after `most_s` seconds, or when `close` is called."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self._closed else most_s) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.remove(limit)

    def close(self) -> None:
        """End all answers in the next turn of the event loop. Tasks that are already scheduled send their data first."""
        self._closed = True
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now_s)
