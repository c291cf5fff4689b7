"""Ends, when the gateway drains, the answers that have no end of their own: of the console and of followed logs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class EndlessAnswers:
    """The answers that are being sent."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        self._closed = False

    @contextlib.asynccontextmanager
    async def limited(self, most_s: float | None = None) -> AsyncIterator[None]:
        """Run the block until it ends, `most_s` seconds have passed, or `close` is called; it is cancelled then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self._closed else most_s) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.remove(limit)

    def close(self) -> None:
        """End all answers once they have sent what is there."""
        self._closed = True
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(now_s)
