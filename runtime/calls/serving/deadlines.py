"""Keeps a timer for each invocation.

Nearly all invocations end long before their deadline, so setting and cancelling a timer must be cheap. A time that is
not soon is only an entry in a slot, as in a hierarchical timing wheel (Varghese and Lauck, SOSP '87): slots of one
second for the next two minutes, and wider slots after that. All slots share one timer of the event loop. When a slot
opens, its invocations move to narrower slots, or get timers of their own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from .invocation import Invocation

# An invocation that is due within this time gets its own timer. An invocation that is due later waits in a slot, which
# opens SOON_S / 2 to SOON_S before the invocation is due.
SOON_S = 2.0
# The slots of each level are RATIO times as wide as the slots of the level before. A time goes into the first level
# on which the time is less than 2 * RATIO slots away.
RATIO = 64
# Tolerance: a time at most this far in the future counts as reached, because timers may fire slightly early.
EARLY_S = 0.001

_Slot = dict[Invocation, float]


class Deadlines:
    """The timers of invocations, at most one for each. A timer calls `on_due` with each invocation that is due.

    There are few slots, so empty slots stay until they open. But after `close`, empty slots and their timer are
    removed at once, so that no timer keeps a retired revision in memory.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[Invocation], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        # The slots by the second at which each opens.
        self._slots: dict[int, _Slot] = {}
        self._timers: dict[Invocation, asyncio.TimerHandle | _Slot] = {}
        self._next: asyncio.TimerHandle | None = None
        self._next_s = math.inf
        self._closed = False

    def set(self, invocation: Invocation, when_s: float, now_s: float) -> None:
        """Make an invocation due at `when_s`. This replaces the time that was set before."""
        if invocation in self._timers:
            self.cancel(invocation)
        left_s = when_s - now_s
        if left_s <= SOON_S:
            self._timers[invocation] = self._loop.call_later(max(0.0, left_s), self._fire, invocation)
            return
        width = 1
        while left_s >= 2 * RATIO * width:
            width *= RATIO
        second = int(when_s - SOON_S / 2) // width * width
        if (slot := self._slots.get(second)) is None:
            slot = self._slots[second] = {}
            if second < self._next_s:
                self._open_at(second, now_s)
        slot[invocation] = when_s
        self._timers[invocation] = slot

    def cancel(self, invocation: Invocation) -> None:
        timer = self._timers.pop(invocation, None)
        if isinstance(timer, dict):
            del timer[invocation]
            if self._closed and not timer:
                self._remove_empty()
        elif timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Drop empty slots now and later, so that only invocations keep timers of the event loop."""
        self._closed = True
        self._remove_empty()

    def _remove_empty(self) -> None:
        self._slots = {second: slot for second, slot in self._slots.items() if slot}
        if not self._slots:
            self._stop()

    def _fire(self, invocation: Invocation) -> None:
        self._timers.pop(invocation, None)
        self._on_due(invocation)

    def _open_at(self, second: int, now_s: float) -> None:
        self._stop()
        self._next_s = second
        self._next = self._loop.call_later(max(0.0, second - now_s), self._open)

    def _stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next, self._next_s = None, math.inf

    def _open(self) -> None:
        """Open the slots whose time has come: set their invocations again, and start the timer of the next slot."""
        self._next, self._next_s = None, math.inf
        now_s = time.monotonic()
        for second in [second for second in self._slots if second <= now_s + EARLY_S]:
            for invocation, when_s in self._slots.pop(second).items():
                del self._timers[invocation]
                self.set(invocation, when_s, now_s)
        if self._slots:
            self._open_at(min(self._slots), now_s)
