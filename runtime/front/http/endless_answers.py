"""Ends endless answers, such as the console and followed logs, when the gateway drains or the caller's API key ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable

from ...ground.access.keys import Caller


class EndlessAnswers:
    """The endless answers that the gateway sends now."""

    def __init__(self) -> None:
        # The timeout of each answer, with the id of the caller's API key.
        self._limits: dict[asyncio.Timeout, str] = {}
        self._closed = False

    @contextlib.asynccontextmanager
    async def limited(self, caller: Caller) -> AsyncIterator[None]:
        """Run the block. Cancel it when the caller's key expires or is revoked, or when `close` is called."""
        left_s = None if caller.expires_s is None else max(0.0, caller.expires_s - time.time())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self._closed else left_s) as limit:
                self._limits[limit] = caller.owner
                try:
                    yield
                finally:
                    del self._limits[limit]

    def close(self) -> None:
        """End all answers in the next turn of the event loop. Tasks that are already scheduled run before, and may send data."""
        self._closed = True
        self._end(self._limits)

    def end_of_key(self, key_id: str) -> None:
        """End the answers to callers with this API key, which was revoked. With "", end the answers to callers without
        a key.
        """
        self._end(limit for limit, owner in self._limits.items() if owner.partition(":")[0] == key_id)

    def _end(self, limits: Iterable[asyncio.Timeout]) -> None:
        now_s = asyncio.get_running_loop().time()
        for limit in limits:
            if not limit.expired():
                limit.reschedule(now_s)
