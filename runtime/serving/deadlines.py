"""The alarms: rings for each invocation whose time is up. Nearly all end long before, so setting and forgetting is cheap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from .invocation import Invocation

# What is due later than this lies in sheets of a second each; a timer of its own it gets only when it is still there then.
SOON_S = 2.0


class Deadlines:
    """One alarm an invocation at a time. It is gone when the invocation has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[Invocation], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._sheets: dict[int, set[Invocation]] = {}

    def set(self, invocation: Invocation, when_s: float, now_s: float) -> None:
        """Rings at `when_s` of the monotonic clock, and at no moment that was set before."""
        invocation.forget_alarm()
        if when_s - now_s <= SOON_S:
            invocation.timer = self._loop.call_later(max(0.0, when_s - now_s), self._ring, invocation)
            return
        second = int(when_s - SOON_S / 2)
        sheet = self._sheets.get(second)
        if sheet is None:
            sheet = self._sheets[second] = set()
            self._loop.call_later(max(0.0, second - now_s), self._open, second)
        sheet.add(invocation)
        invocation.sheet = sheet
        invocation.due_s = when_s

    def _open(self, second: int) -> None:
        now_s = time.monotonic()
        for invocation in self._sheets.pop(second):
            invocation.sheet = None
            left_s = max(0.0, invocation.due_s - now_s)
            invocation.timer = self._loop.call_later(left_s, self._ring, invocation)
