"""Defines the drain of a retiring revision: its accepted invocations run to their own deadlines, unless the gateway ends."""

from __future__ import annotations

import asyncio
import math
import time

from ...calls.serving.call_ends import CallEnd, shutting_down
from .pool import STOP_TIMEOUT_S

# Workers have at least this time for their `teardown`, even if their invocations have used up the time of the drain. If the
# drain has a shorter limit, workers have only the time of that limit.
MIN_TEARDOWN_S = 2.0


class Drain:
    """The time that a retiring revision has, and whether its invocations have ended."""

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self._limit_s = self._until_s = math.inf
        self._timers: list[asyncio.TimerHandle] = []
        self.end: CallEnd | None = None
        """The errors of the invocations that have not ended in time; None if the gateway does not end."""
        self.cut = 0
        """The number of invocations that had begun and have not ended in time."""

    def limit(self, timeout_s: float) -> None:
        """End the drain at the latest `timeout_s` from now. This may be called before the drain begins."""
        self._limit_s, self._until_s = timeout_s, min(self._until_s, time.monotonic() + timeout_s)
        self._timers.append(asyncio.get_running_loop().call_later(timeout_s, self._over.set))

    def limit_shutdown(self, drain_s: float) -> None:
        """Let the drain end at the latest `drain_s` from now, because the gateway ends."""
        self.end = shutting_down(drain_s)
        self.limit(drain_s)

    def note_empty(self) -> None:
        """Learn that no accepted invocation is left."""
        self._over.set()

    async def wait(self) -> None:
        """Wait until no accepted invocation is left, or the time is over."""
        await self._over.wait()
        for timer in self._timers:
            timer.cancel()

    @property
    def teardown_s(self) -> float:
        """The seconds that workers have to exit."""
        left_s = self._until_s - time.monotonic()
        return max(min(left_s, STOP_TIMEOUT_S), min(self._limit_s, MIN_TEARDOWN_S))
